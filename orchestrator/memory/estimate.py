"""What a prediction says of one device's memory.

Takes nothing, holds numbers. A number nobody can know is None, with the reason in `unknown` or `notes`.
"""

from typing import Literal

from train.spec import Problem, Spec

Phase = Literal["init", "forward", "backward", "optimizer_step", "resume"]
PHASES: tuple[Phase, ...] = ("init", "forward", "backward", "optimizer_step", "resume")


class MemoryEstimate(Spec):
    """Predicted peak of one device, rank 0's, from the second step on; bytes."""

    method: Literal["formula"]
    peak_phase: Phase | None
    """The phase of the peak."""
    peak_instant: str | None
    """The moment of the peak within its phase, for a person."""
    peak_allocated_bytes: int | None
    """Tensors alive at the peak; on cuda with the workspace of matrix products, and as the allocator rounds them."""
    peak_reserved_bytes: int | None
    """What the CUDA allocator holds, free blocks of other streams included; on cpu the same as allocated."""
    peak_device_bytes: int | None
    """All that the process takes from the device: tensors, workspace, context and NCCL."""
    phases: dict[Phase, int | None]
    """Peak of allocated bytes in each phase."""
    first_step_peak_allocated_bytes: int | None
    """Peak of the first step, before which AdamW has no states."""
    first_step_peak_reserved_bytes: int | None
    """What the CUDA allocator holds at the end of the first step; on cpu the same as allocated."""
    terms: dict[str, int | None]
    """What peak_device_bytes is made of; they add up to it."""
    recompute_flops_fraction: float | None
    """FLOPs of recomputation as a share of the step's FLOPs without it."""
    unknown: tuple[Problem, ...]
    """Why there is no number; empty when there is one."""
    notes: tuple[str, ...]
    """What the number leaves out or assumes."""


def cannot_tell(reasons: tuple[Problem, ...]) -> MemoryEstimate:
    """The estimate of a config that the method has no formula for."""
    return MemoryEstimate(
        method="formula",
        peak_phase=None,
        peak_instant=None,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        peak_device_bytes=None,
        phases=dict.fromkeys(PHASES),
        first_step_peak_allocated_bytes=None,
        first_step_peak_reserved_bytes=None,
        terms={},
        recompute_flops_fraction=None,
        unknown=reasons,
        notes=(),
    )
