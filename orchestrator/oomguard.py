"""The verdict on an estimate: how much margin it needs and whether it fits.

Takes a TrainSpec, a MemoryEstimate, the usable bytes and what finished runs showed, gives a Verdict. It has no formula
of memory.
"""

from collections.abc import Mapping
from typing import Literal

from orchestrator.memory.estimate import MemoryEstimate
from orchestrator.units import gib
from train.spec import Spec, TrainSpec

# What the estimate does not see, before enough runs have been measured. One-sided: the margin is on top.
# cuda: reserved over allocated bytes with the default allocator, 1.04 to 1.7 in 931 published logs (1.20 and 1.36 in
#   the two with FSDP2, Llama-2-7B with checkpointing).
# cpu: tests/bench/cpu_resident.py measures at most 0.4 % more than was predicted; freed memory is returned there
#   (train/measure.py).
_CUDA_MOST_RESERVED = 1.7
_CPU_IDLE_SHARE = 0.05
# A further run, exchangeable with n others, passes the largest of their misses once in n + 1 times: with 20 rows less
# than 5 % of the runs do.
LEAST_ROWS = 20
# Where no run was under-predicted, the next one may still be by the noise of one code path, about 2 % between devices.
_LEAST_SHARE = 0.02
# What a small run misses is rounding and a constant, which says nothing of a large one's blocks and streams.
LEAST_SIZE = 4
"""A measured run counts for those of at most so many times its tensors."""
_NO_TENSORS = ("context", "nccl", "workspace")
"""Terms of a peak that are constants of the device: no formula is right or wrong about them."""


class Miss(Spec):
    """One finished run with a predicted and a measured peak."""

    tensors_bytes: int
    """Of the prediction, without context, NCCL and workspace; more than 0."""
    share: float
    """Measured less predicted peak as a share of these; negative where less was taken than predicted."""


class Misses(Spec):
    """What the finished runs of one method and one kind of device showed, across policies."""

    rows: tuple[Miss, ...]
    out_of_memory: int
    """Runs that were accepted and ended out of memory: their peak is not among the rows."""

    def for_tensors(self, tensors_bytes: int) -> tuple[Miss, ...]:
        """The rows that speak of a run with so many bytes of tensors: those of at least a quarter of them."""
        return tuple(row for row in self.rows if row.tensors_bytes * LEAST_SIZE >= tensors_bytes)

    @property
    def measured_up_to_bytes(self) -> int | None:
        """Most bytes of tensors of a run whose margin is measured; None where there are fewer than 20 rows."""
        sizes = sorted((row.tensors_bytes for row in self.rows), reverse=True)
        return sizes[LEAST_ROWS - 1] * LEAST_SIZE if len(sizes) >= LEAST_ROWS else None


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
    margin_source: str | None
    """Where the margin comes from: measured runs, with how many, or the documented bound; null without a margin."""
    estimate: MemoryEstimate


class Margin(Spec):
    """Bytes on top of a prediction, and where they come from."""

    margin_bytes: int
    source: str


def margin(spec: TrainSpec, estimate: MemoryEstimate, misses: Misses | None) -> Margin | None:
    """Most that the estimate may miss; None where it has no peak.

    From `misses` where at least 20 of their rows have a quarter of its tensors or more: the largest under-prediction of
    these as a share of the tensors, and never under 2 %. Otherwise, and at least that much where an accepted run ended
    out of memory, the documented bound of the method.
    """
    peak = estimate.peak_device_bytes
    documented = _documented(spec, estimate)
    if peak is None or documented is None:
        return None
    tensors = tensors_bytes(peak, estimate.terms)
    rows = () if misses is None else misses.for_tensors(tensors)
    if misses is None or len(rows) < LEAST_ROWS:
        until = f"until {LEAST_ROWS} runs of at least a quarter of its size are measured, {len(rows)} so far"
        return documented.model_copy(update={"source": f"{documented.source}, {until}"})
    largest = max(0.0, *(row.share for row in rows))
    share = max(largest, _LEAST_SHARE)
    measured = int(tensors * share)
    if misses.out_of_memory and documented.margin_bytes > measured:
        ended = f"{misses.out_of_memory} accepted run(s) ended out of memory"
        source = f"{documented.source}, since {ended}, whatever {len(rows)} measured runs say"
        return documented.model_copy(update={"source": source})
    seen = f"largest under-prediction of {len(rows)} measured runs of at least a quarter of its size"
    floor = f", at least {_LEAST_SHARE:.0%}" if share > largest else ""
    return Margin(margin_bytes=measured, source=f"{seen}, {largest:.1%} of the tensors{floor}")


def tensors_bytes(peak_device_bytes: int, terms: Mapping[str, int | None]) -> int:
    """Bytes of a predicted peak that are tensors or held for them: all but context, NCCL and workspace."""
    return peak_device_bytes - sum(terms.get(name) or 0 for name in _NO_TENSORS)


def _documented(spec: TrainSpec, estimate: MemoryEstimate) -> Margin | None:
    """The documented bound of the method: cuda up to 1.7 times the tensors in all, cpu 5 % on top of them."""
    allocated, reserved = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    if allocated is None or reserved is None:
        return None
    if spec.device.kind == "cuda":
        held = max(0, int(allocated * _CUDA_MOST_RESERVED) - reserved)
        return Margin(margin_bytes=held, source=f"documented bound, reserved up to {_CUDA_MOST_RESERVED} x allocated")
    return Margin(
        margin_bytes=int(allocated * _CPU_IDLE_SHARE), source=f"documented bound, {_CPU_IDLE_SHARE:.0%} of the tensors"
    )


def judge(spec: TrainSpec, estimate: MemoryEstimate, usable_bytes: int | None, misses: Misses | None = None) -> Verdict:
    """fits, tight or does_not_fit, and unknown where the estimate or the usable bytes are.

    `misses` are of the estimate's method and of the device's kind; None: nobody looked for finished runs.
    """
    peak, allowed = estimate.peak_device_bytes, margin(spec, estimate, misses)
    usable = None if usable_bytes is None else int(usable_bytes * spec.budget.max_device_memory_fraction)
    verdict: Literal["fits", "tight", "does_not_fit", "unknown"]
    if peak is None or allowed is None:
        verdict, reason = "unknown", "; ".join(str(problem) for problem in estimate.unknown)
    elif usable is None:
        verdict = "unknown"
        reason = f"device.usable_bytes=null: nobody measured it on {spec.device.name}. Set it to the bytes you can get."
    else:
        where = f"in {_words(estimate)} ({_largest(estimate)})"
        of = f"{gib(peak)} of {gib(usable)} usable{_fraction(spec)}, {where}"
        if peak > usable:
            verdict, reason = "does_not_fit", f"does not fit: {of}"
        elif peak + allowed.margin_bytes > usable:
            verdict = "tight"
            more = f"it may take up to {gib(allowed.margin_bytes)} more ({allowed.source})"
            reason = f"tight: {of}; it can run out of memory, as {more}"
        else:
            verdict, reason = "fits", f"fits: {of}"
    return Verdict(
        verdict=verdict,
        reason=reason,
        usable_bytes=usable,
        margin_bytes=None if allowed is None else allowed.margin_bytes,
        margin_source=None if allowed is None else allowed.source,
        estimate=estimate,
    )


def _words(estimate: MemoryEstimate) -> str:
    phase = (estimate.peak_phase or "").replace("_", " ")
    return f"{phase}, {estimate.peak_instant}"


def _largest(estimate: MemoryEstimate) -> str:
    name, value = max(((n, v) for n, v in estimate.terms.items() if v is not None), key=lambda term: term[1])
    return f"{name.replace('_', ' ')} {gib(value)}"


def _fraction(spec: TrainSpec) -> str:
    share = spec.budget.max_device_memory_fraction
    return "" if share == 1.0 else f" (budget.max_device_memory_fraction={share})"
