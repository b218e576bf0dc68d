"""Run folders: claimed by an exclusive mkdir, filled with what was planned.

Takes a RunSpec and the plan's JSON, gives the folder. Raises NotSubmittedError when it cannot be written.
"""

import fcntl
import json
import os
import random
import shutil
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.errors import NotSubmittedError
from orchestrator.ledger import write
from orchestrator.spec import RunSpec
from train import shapes
from train.report import write_json
from train.spec import TrainSpec

CORPUS_FILE = "corpus.json"
_TRIES = 20
_ATTEMPT_FILES = ("spec.json", "plan.json", "submission.json")


def claim(spec: RunSpec) -> tuple[RunSpec, Path]:
    """A folder of its own under launch.runs_dir, and the spec with its name: model-ckpt-b4-t1024-date-abcd."""
    runs_dir = Path(spec.launch.runs_dir).expanduser().resolve()
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            letters = "".join(random.choices(string.ascii_lowercase, k=4))
            run_dir = runs_dir / f"{spec.name}-{time.strftime('%Y%m%d')}-{letters}"
            try:
                run_dir.mkdir()
            except FileExistsError:
                continue
            return spec.model_copy(update={"name": run_dir.name}), run_dir
    except OSError as error:
        raise NotSubmittedError(_cannot_write(runs_dir, error)) from error
    raise NotSubmittedError(f"no free run name was found in {runs_dir} in {_TRIES} tries.")


def write_plan(run_dir: Path, spec: RunSpec, plan: dict[str, Any]) -> None:
    """spec.json and plan.json."""
    try:
        write(run_dir / "spec.json", spec)
        write_json(run_dir / "plan.json", json.dumps(plan, indent=2) + "\n")
    except OSError as error:
        raise NotSubmittedError(_cannot_write(run_dir, error)) from error


def set_aside(run_dir: Path, attempt: int) -> None:
    """Before a new attempt: keep what the earlier one was started with as <name>.<attempt>.json."""
    for name in _ATTEMPT_FILES:
        path = run_dir / name
        try:
            if path.exists():
                write_json(path.with_suffix(f".{attempt}.json"), path.read_text(encoding="utf-8"))
        except OSError as error:
            raise NotSubmittedError(_cannot_write(run_dir, error)) from error


def undo(run_dir: Path, attempt: int) -> None:
    """After an attempt that could not be started: no folder where it was the first, else the run as it was."""
    if attempt == 1:
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    for name in _ATTEMPT_FILES:
        kept = (run_dir / name).with_suffix(f".{attempt - 1}.json")
        if kept.exists():
            kept.replace(run_dir / name)


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep other launchers from starting the run's next attempt; raises NotSubmittedError where one does already."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise NotSubmittedError(f"{run_dir.name} is being resumed from another shell. Nothing was started.") from error
    finally:
        os.close(descriptor)


def check_space(spec: RunSpec, run_dir: Path | None = None) -> None:
    """Refuse a run whose checkpoints do not fit on the disk beside each other while one is written.

    `run_dir` is that of a run to be resumed: the checkpoints in there have their room already.
    """
    runs_dir = Path(spec.launch.runs_dir).expanduser().resolve()
    a_checkpoint = checkpoint_bytes(spec.train)
    most = spec.train.checkpoint.keep + 1
    there = 0 if run_dir is None else len(list((run_dir / "checkpoints").glob("step-*/.metadata")))
    needed = a_checkpoint * max(1, most - there)
    try:
        free = shutil.disk_usage(next(path for path in (runs_dir, *runs_dir.parents) if path.exists())).free
    except OSError as error:
        raise NotSubmittedError(_cannot_write(runs_dir, error)) from error
    if needed > free:
        beside = f", {there} of them there already" if there else ""
        raise NotSubmittedError(
            f"launch.runs_dir={spec.launch.runs_dir}: {_size(free)} free, and this run's checkpoints take "
            f"{_size(needed)} ({_size(a_checkpoint)} each, checkpoint.keep={spec.train.checkpoint.keep} and one "
            f"being written{beside}). Set launch.runs_dir to a disk with more room, or lower checkpoint.keep."
        )


def checkpoint_bytes(spec: TrainSpec) -> int:
    """Bytes of one checkpoint: parameters and AdamW's two moments in the parameters' precision."""
    width = 2 if spec.train.precision == "bf16" else 4
    return 3 * width * shapes.num_parameters(spec.model)


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"launch.runs_dir: {path} cannot be written ({error.strerror}). Nothing was started. "
        "Set launch.runs_dir to a folder that you can write."
    )


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.1f} MiB"
