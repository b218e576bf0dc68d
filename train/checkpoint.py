"""Checkpoints with torch.distributed.checkpoint: written aside, agreed by all ranks, renamed, then `latest`.

Takes the sharded module, the optimizer and the Progress; gives folders `checkpoints/step-<n>`. A folder without
`.metadata` is incomplete: the last thing that a save writes.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from train.report import write_json
from train.spec import Spec

FOLDER = "checkpoints"
_PROGRESS = "progress.json"


class Progress(Spec):
    """How far a run is; what a resume continues from, with whatever number of ranks."""

    step: int
    """Optimizer steps done."""
    sequences: int
    """Training sequences seen over all ranks: the position in the data."""
    tokens: int
    """Training tokens seen over all ranks."""
    wall_time_s: float
    """Seconds of training over all attempts."""
    device_hours: float
    """Hours times devices over all attempts."""
    step_time_s: float
    """Seconds of the last step; a resume ends at once where another one would pass a limit of time."""
    data_fingerprint: str
    """Of the training tokens; a resume on other data is refused."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says why and what to do."""


def save(run_dir: Path, progress: Progress, module: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write a checkpoint, collectively; older ones beyond `keep` and incomplete ones go once it is complete.

    Raises CheckpointError on every rank when any rank failed; the older checkpoints are then untouched.
    """
    folder = run_dir / FOLDER
    target = folder / f"step-{progress.step:08d}"
    aside = folder / f".{target.name}.tmp"
    on_first = dist.get_rank() == 0
    failure = _collectively(lambda: _prepare(aside, progress) if on_first else None)
    if failure is None:
        failure = _collectively(lambda: _write(aside, module, optimizer))
    if failure is None:
        failure = _collectively(lambda: _publish(folder, aside, target, keep) if on_first else None)
    if failure is not None:
        # All wait for it: on a full disk the others need the room to say how they failed.
        _collectively(lambda: shutil.rmtree(aside, ignore_errors=True) if on_first else None)
        raise CheckpointError(
            f"the checkpoint of step {progress.step} could not be written to {folder}: {failure}. "
            "Free space there, then resume; complete checkpoints are untouched."
        )
    return target


def _prepare(aside: Path, progress: Progress) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_json(aside / _PROGRESS, progress.model_dump_json(indent=2))


def _write(aside: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save_state(_state(module, optimizer), storage_writer=_Writer(aside, single_file_per_rank=True))


class _Writer(FileSystemWriter):
    """Names the disk's own error, which torch.save covers up by one of its own ("unexpected pos") on a full disk.

    It must be found on the rank that met it: an exception loses what it came from on its way to another rank.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _publish(folder: Path, aside: Path, target: Path, keep: int) -> None:
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    write_json(folder / "latest", target.name + "\n")
    kept = sorted(_complete(folder))[-keep:]
    for old in [*folder.glob("step-*"), *folder.glob(".step-*.tmp")]:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)


def _collectively(action: Callable[[], None]) -> str | None:
    """Do it on this rank; the reason of the lowest rank that failed, None when none did."""
    reason: str | None = None
    try:
        action()
    except CheckpointException as error:  # derives from BaseException
        reason = _first_reason(error)
    except OSError as error:
        reason = error.strerror or str(error)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((r for r in reasons if r is not None), None)


def _first_reason(error: CheckpointException) -> str:
    for failure in error.failures.values():
        cause = failure[0] if isinstance(failure, tuple) else failure
        while cause is not None and not isinstance(cause, OSError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        return str(cause)
    return str(error)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(module, optimizer)
    return {"model": model_state, "optim": optim_state}


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if (path / ".metadata").exists()]


def latest(run_dir: Path, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """The newest complete checkpoint, None where there is none; says a line for each incomplete one."""
    folder = run_dir / FOLDER
    if not folder.exists():
        return None
    complete = sorted(_complete(folder))
    for path in sorted([*folder.glob("step-*"), *folder.glob(".step-*.tmp")]):
        if path not in complete:
            say(f"skipping the incomplete checkpoint {path.name}: its save did not finish")
    return complete[-1] if complete else None


def read_progress(checkpoint: Path) -> Progress:
    """Progress of a complete checkpoint."""
    return Progress.model_validate_json((checkpoint / _PROGRESS).read_text(encoding="utf-8"))


def load(checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill module and optimizer in place, collectively; any number of ranks may have written it.

    Raises CheckpointError when it cannot be read.
    """
    state = _state(module, optimizer)
    try:
        load_state(state, storage_reader=FileSystemReader(checkpoint))
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {_first_reason(error)}") from error
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return read_progress(checkpoint)
