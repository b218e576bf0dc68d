"""The closed-form estimate: from a TrainSpec to the predicted peak of one device, without torch.

`estimate` is the only way in. A setting without a formula makes the estimate unknown and is named; it never makes
a number with a warning.
"""

from collections.abc import Sequence

from orchestrator.memory.allocator import reserved_bytes
from orchestrator.memory.estimate import PHASES, MemoryEstimate, Phase, cannot_tell
from orchestrator.memory.sizes import Sizes
from orchestrator.memory.step import Moment, moments_of
from train.spec import Problem, TrainSpec, as_typed

GIB = 1024**3
# Where nobody measured a card, the highest published figures: contexts of 0.2 to 1.3 GiB by device (the highest is a
# V100's, Hugging Face's notes on performance), NCCL's buffers of 1 to 2 GiB (conf/device/*.yaml, sources).
_HIGHEST_CONTEXT_BYTES = int(1.3 * GIB)
_HIGHEST_NCCL_BYTES = 2 * GIB
_SM90_WORKSPACE_BYTES = 33554432  # aten/src/ATen/cuda/CublasHandlePool.cpp
_FLASH_MAX_HEAD_DIM = 256
_FLASH_HEAD_DIM_STEP = 8
_FLASH_CAPABILITY = 8.0


def estimate(spec: TrainSpec) -> MemoryEstimate:
    """Predicted peak of rank 0's device; `spec.device` must be resolved (not kind auto).

    Bytes; all None, with the reasons, for a setting that has no formula. Held against live tensors on CPU by
    tests/test_memory.py.
    """
    unknown = _without_formula(spec)
    if unknown:
        return cannot_tell(unknown)
    sizes = Sizes(spec)
    every = moments_of(sizes, sizes.layers_that_matter())
    totals = [moment.total_bytes for moment in every]
    peak = every[totals.index(max(totals))]
    highest: dict[Phase, int] = dict.fromkeys(PHASES, 0)
    for moment, total in zip(every, totals, strict=True):
        highest[moment.phase] = max(highest[moment.phase], total)
    first = _first_step(every)
    context, workspace, nccl, notes = _overheads(spec)
    terms = {name: value for name, value in peak.terms().items() if value}
    terms |= {"context": context, "nccl": nccl, "workspace": workspace}
    allocated = reserved = max(totals)
    first_allocated = first_reserved = max(moment.total_bytes for moment in first)
    if sizes.here.on_cuda:
        largest = sizes.largest_tensor_bytes()
        allocated, first_allocated = allocated + workspace, first_allocated + workspace
        reserved = reserved_bytes(every, largest, workspace)
        first_reserved = reserved_bytes(first, largest, workspace)
        terms["allocator_idle"] = reserved - allocated
    return MemoryEstimate(
        method="formula",
        peak_phase=peak.phase,
        peak_instant=peak.name,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=sum(terms.values()),
        phases=dict(highest),
        first_step_peak_allocated_bytes=first_allocated,
        first_step_peak_reserved_bytes=first_reserved,
        terms=dict(terms),
        recompute_flops_fraction=sizes.recompute_flops_fraction,
        unknown=(),
        notes=notes,
    )


def _first_step(every: Sequence[Moment]) -> tuple[Moment, ...]:
    """AdamW makes its states in the first optimizer step: before it they are not there."""
    return tuple(
        moment if moment.phase == "optimizer_step" else moment._replace(optimizer_states=0)
        for moment in every
        if moment.phase != "resume"
    )


def _overheads(spec: TrainSpec) -> tuple[int, int, int, tuple[str, ...]]:
    """Context, workspace and NCCL bytes, which the device holds besides tensors, and what had to be assumed of them."""
    device, notes = spec.device, []
    context, nccl, workspace = device.context_bytes, device.nccl_bytes, device.workspace_bytes
    if context is None:
        context = _HIGHEST_CONTEXT_BYTES
        notes.append(f"device.context_bytes: not measured on {device.name}; the highest published, 1.3 GiB, counts")
    if workspace is None:
        workspace = _SM90_WORKSPACE_BYTES
        notes.append(f"device.workspace_bytes: not measured on {device.name}; the largest default, 32 MiB, counts")
    if spec.parallel.world_size == 1:
        nccl = 0
    elif nccl is None:
        nccl = _HIGHEST_NCCL_BYTES
        notes.append(f"device.nccl_bytes: not measured on {device.name}; the highest published, 2 GiB, counts")
    if device.kind == "cuda":
        notes.append("reserved bytes: each stream's own peak, in segments; the margin is for what fragments beyond")
    return context, workspace, nccl, tuple(notes)


def _without_formula(spec: TrainSpec) -> tuple[Problem, ...]:
    found: list[Problem] = []
    if spec.train.compile:
        why = "what the compiler keeps for backward is not known beforehand"
        found.append(_unknown("train.compile", True, why, "Set it to false"))
    if spec.parallel.cpu_offload:
        found.append(_unknown("parallel.cpu_offload", True, "there is no formula for it", "Set it to false"))
    return (*found, *_unknown_kernel(spec))


def _unknown(key: str, value: object, why: str, fix: str) -> Problem:
    return Problem(key=key, value=as_typed(value), why=why, fix=fix)


def _unknown_kernel(spec: TrainSpec) -> list[Problem]:
    """On CUDA torch picks the attention kernel; the formula is for those that keep no scores and no padded copies.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (check_head_dim_size_flash, check_sm_version,
    check_mem_efficient_hardware_support, and pad_last_dim in attention.cpp).
    """
    model, loop, capability = spec.model, spec.train, spec.device.compute_capability
    if spec.device.kind != "cuda" or model.attention != "sdpa":
        return []
    found = []
    by_scores = "or model.attention=math"
    if model.head_dim > _FLASH_MAX_HEAD_DIM or model.head_dim % _FLASH_HEAD_DIM_STEP:
        why = f"fused attention takes heads of a multiple of 8 up to {_FLASH_MAX_HEAD_DIM} numbers without a copy"
        found.append(_unknown("model.head_dim", model.head_dim, why, f"Set it to such a number, {by_scores}"))
    if loop.precision == "fp32" and model.num_kv_heads != model.num_heads:
        why = "in fp32 not every torch has a fused attention kernel for grouped key-value heads"
        fix = f"Set train.precision=bf16_mixed, {by_scores}"
        found.append(_unknown("model.num_kv_heads", model.num_kv_heads, why, fix))
    if loop.precision != "fp32" and (capability is None or capability < _FLASH_CAPABILITY):
        why = f"fused attention in bf16 needs a compute capability of {_FLASH_CAPABILITY}"
        fix = f"Set train.precision=fp32, {by_scores}" if capability else f"Set it, {by_scores}"
        found.append(_unknown("device.compute_capability", capability, why, fix))
    return found
