"""The verdict on an estimate: how much margin it needs and whether it fits.

Takes a TrainSpec, a MemoryEstimate and the usable bytes, gives a Verdict. It has no formula of memory.
"""

from typing import Literal

from orchestrator.memory.estimate import MemoryEstimate
from train.spec import Spec, TrainSpec

GIB = 1024**3
# What the estimate does not see, as a share of its tensors, at most. One-sided: the margin is on top.
# cuda: reserved over allocated bytes with the default allocator, 1.04 to 1.7 in 931 published logs (1.20 and 1.36 in
#   the two with FSDP2, Llama-2-7B with checkpointing).
# cpu: tests/bench/cpu_resident.py measures at most 0.4 % more than was predicted; freed memory is returned there
#   (train/measure.py).
_CUDA_IDLE_SHARE = 0.70
_CPU_IDLE_SHARE = 0.05


class Verdict(Spec):
    """Whether a run fits its device, and why."""

    verdict: Literal["fits", "tight", "does_not_fit", "unknown"]
    """tight: fits without the margin, not with it."""
    reason: str
    """One line for a person."""
    usable_bytes: int | None
    """What the run may plan for: the device's bytes times budget.max_device_memory_fraction."""
    margin_bytes: int | None
    """Most that the estimate is known to miss, on top of its peak; null without one."""
    estimate: MemoryEstimate


def margin_bytes(spec: TrainSpec, estimate: MemoryEstimate) -> int | None:
    """The documented bound of the method: bytes that may be held idle beside the tensors of the peak."""
    if estimate.peak_allocated_bytes is None:
        return None
    share = _CUDA_IDLE_SHARE if spec.device.kind == "cuda" else _CPU_IDLE_SHARE
    return int(estimate.peak_allocated_bytes * share)


def judge(spec: TrainSpec, estimate: MemoryEstimate, usable_bytes: int | None) -> Verdict:
    """fits, tight or does_not_fit, and unknown where the estimate or the usable bytes are."""
    peak, margin = estimate.peak_device_bytes, margin_bytes(spec, estimate)
    usable = None if usable_bytes is None else int(usable_bytes * spec.budget.max_device_memory_fraction)
    verdict: Literal["fits", "tight", "does_not_fit", "unknown"]
    if peak is None or margin is None:
        verdict, reason = "unknown", "; ".join(str(problem) for problem in estimate.unknown)
    elif usable is None:
        verdict = "unknown"
        reason = f"device.usable_bytes=null: nobody measured it on {spec.device.name}. Set it to the bytes you can get."
    else:
        where = f"in {_words(estimate)} ({_largest(estimate)})"
        of = f"{gib(peak)} of {gib(usable)} usable{_fraction(spec)}, {where}"
        if peak > usable:
            verdict, reason = "does_not_fit", f"does not fit: {of}"
        elif peak + margin > usable:
            verdict = "tight"
            reason = f"tight: {of}; up to {gib(margin)} more may be held idle, so it can run out of memory"
        else:
            verdict, reason = "fits", f"fits: {of}"
    return Verdict(verdict=verdict, reason=reason, usable_bytes=usable, margin_bytes=margin, estimate=estimate)


def gib(count: int) -> str:
    """Bytes for a person."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"


def _words(estimate: MemoryEstimate) -> str:
    phase = (estimate.peak_phase or "").replace("_", " ")
    return f"{phase}, {estimate.peak_instant}"


def _largest(estimate: MemoryEstimate) -> str:
    name, value = max(((n, v) for n, v in estimate.terms.items() if v is not None), key=lambda term: term[1])
    return f"{name.replace('_', ' ')} {gib(value)}"


def _fraction(spec: TrainSpec) -> str:
    share = spec.budget.max_device_memory_fraction
    return "" if share == 1.0 else f" (budget.max_device_memory_fraction={share})"
