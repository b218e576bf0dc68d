"""Which limit ends a run: planned steps and tokens, wall time, device-hours, or being asked to stop.

Takes a TrainSpec and the Progress, gives an Ending or None. Clocks and ranks stay in the loop.
"""

from dataclasses import dataclass
from typing import Literal

from train.checkpoint import Progress
from train.spec import BudgetSpec, TrainSpec


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a run ends."""

    outcome: Literal["completed", "budget", "stopped"]
    """completed: the planned steps are done; budget: another limit came first; stopped: asked to stop."""
    reason: str
    """The limit by its config key, or what asked."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Whether another step would pass a limit of time."""

    wall_time: bool
    """budget.max_wall_time_s."""
    device_hours: bool
    """budget.max_device_hours."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know alike after a step."""

    loss: float
    """Mean over all ranks."""
    stop: bool
    """Any rank was asked to stop."""
    passes: Passes
    """By rank 0's clock."""


def next_step_passes(spec: TrainSpec, wall_time_s: float, device_hours: float, step_time_s: float) -> Passes:
    """After so much time, with another step as long as the last one."""
    budget = spec.budget
    step_hours = step_time_s * spec.parallel.world_size / 3600
    return Passes(
        wall_time=budget.max_wall_time_s is not None and wall_time_s + step_time_s > budget.max_wall_time_s,
        device_hours=budget.max_device_hours is not None and device_hours + step_hours > budget.max_device_hours,
    )


def planned_ending(spec: TrainSpec, progress: Progress) -> Ending | None:
    """Whether a start with this progress has nothing left to do."""
    budget = spec.budget
    passes = next_step_passes(spec, progress.wall_time_s, progress.device_hours, progress.step_time_s)
    return _completed(spec, progress) or _out_of_time(budget, passes)


def ending_after(spec: TrainSpec, progress: Progress, agreed: Agreed) -> Ending | None:
    """Whether the run ends after this step: the plan first, then whoever asked, then time."""
    if completed := _completed(spec, progress):
        return completed
    if agreed.stop:
        return Ending(outcome="stopped", reason="asked to stop")
    return _out_of_time(spec.budget, agreed.passes)


def _completed(spec: TrainSpec, progress: Progress) -> Ending | None:
    budget = spec.budget
    if budget.max_steps is not None and progress.step >= budget.max_steps:
        return Ending(outcome="completed", reason=f"budget.max_steps={budget.max_steps}")
    if budget.max_tokens is not None and progress.tokens + spec.tokens_per_step > budget.max_tokens:
        return Ending(outcome="completed", reason=f"budget.max_tokens={budget.max_tokens}")
    return None


def _out_of_time(budget: BudgetSpec, passes: Passes) -> Ending | None:
    if passes.wall_time:
        return Ending(outcome="budget", reason=f"budget.max_wall_time_s={budget.max_wall_time_s}")
    if passes.device_hours:
        return Ending(outcome="budget", reason=f"budget.max_device_hours={budget.max_device_hours}")
    return None
