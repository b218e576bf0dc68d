"""The record of a run: its folder, read back.

Takes a run folder, gives a RunRecord. Nobody writes a RunRecord; each file in the folder has one writer. It must
not import torch.
"""

import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.spec import RunSpec
from orchestrator.tracking import TrackingRecord, record_file
from train.report import STEPS_FILE, StepReport, TrainReport, write_json
from train.spec import Spec

State = Literal["planned", "submitted", "queued", "running", "completed", "budget", "cancelled", "failed", "lost"]
ENDED: tuple[State, ...] = ("completed", "budget", "cancelled", "failed", "lost")
_START_S = 60.0
_TAIL_BYTES = 1 << 16
"""More than two lines of steps.jsonl take."""
_Record = TypeVar("_Record", bound=Spec)


class Submission(Spec):
    """What was started, for one attempt; submission.json."""

    attempt: int
    """Starts of this run, this one included."""
    kind: str
    """local or inline."""
    submitted_at: float
    """Seconds since the epoch."""
    command: tuple[str, ...]
    """The command line as typed."""
    job_id: str | None
    """submitit's job id: on this machine the process id of its controller."""
    commit: str | None
    """Git commit of the source; null outside a repository."""
    dirty: bool
    """Whether the tree differed from the commit; the difference is in code.patch."""
    code: str
    """Folder of the frozen source that the ranks import."""
    candidates: tuple[str, ...]
    """Ids of devices, or of CPU slots, of which the run leases some."""
    leases: int
    """How many of them it leases."""
    threads_per_rank: int | None
    """Threads of a CPU rank; null on GPUs."""


class NodeRecord(Spec):
    """The process that starts and watches the ranks of a machine; node.<attempt>.json."""

    host: str
    pid: int
    process_start: float
    """Start time of the process, so that a reused pid is not taken for it."""
    leased: tuple[str, ...]
    """Devices or CPU slots; empty while the run is queued."""
    rank_pids: tuple[int, ...]
    """Process ids of the ranks; empty while the run is queued."""


class ExitRecord(Spec):
    """How an attempt ended, as the watcher saw it; exit.<attempt>.json."""

    cause: Literal["completed", "budget", "cancelled", "rank_failed", "out_of_memory", "config_error"]
    exit_code: int
    detail: str
    """One or two sentences: the limit, or the first rank that failed and how."""
    first_failed_rank: int | None
    last_lines: tuple[str, ...]
    """Last lines that this rank printed."""
    ended_at: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its folder tells it."""

    run_dir: Path
    spec: RunSpec
    plan: dict[str, Any]
    """plan.json: what `check output=json` printed."""
    submission: Submission | None
    node: NodeRecord | None
    exit: ExitRecord | None
    report: TrainReport | None
    tracking: TrackingRecord | None
    """Where wandb's files of the newest attempt are."""
    last_step: StepReport | None
    """The step that was written last, of any attempt."""
    state: State

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.run_dir.name

    @property
    def attempt(self) -> int:
        """Starts of this run; 0 before the first."""
        return 0 if self.submission is None else self.submission.attempt

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of one device; None: unknown."""
        value = (self.plan.get("estimate") or {}).get("peak_device_bytes")
        return None if value is None else int(value)

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of rank 0 in the newest attempt, so far or at its end; None: not measured."""
        if self.report is not None:
            return self.report.measured_peak_bytes
        if self.last_step is None or self.last_step.attempt != self.attempt:
            return None
        return self.last_step.peak_device_bytes


def read(run_dir: Path) -> RunRecord:
    """The record of the run in this folder; raises ConfigError when it is no run folder or cannot be read."""
    spec = _read(run_dir / "spec.json", RunSpec)
    if spec is None:
        raise ConfigError([f"{run_dir}: there is no run in this folder (it has no spec.json)."])
    submission = _read(run_dir / "submission.json", Submission)
    attempt = 0 if submission is None else submission.attempt
    node = _read(run_dir / f"node.{attempt}.json", NodeRecord)
    watched = node is not None and alive(node)  # before the ending is read: the watcher's last act is to write it
    ended = _read(run_dir / f"exit.{attempt}.json", ExitRecord)
    return RunRecord(
        run_dir=run_dir,
        spec=spec,
        plan=_read_plan(run_dir / "plan.json"),
        submission=submission,
        node=node,
        exit=ended,
        report=_read(run_dir / f"report.{attempt}.json", TrainReport),
        tracking=_read(record_file(run_dir, attempt), TrackingRecord),
        last_step=_last_step(run_dir / STEPS_FILE),
        state=_state(submission, node, watched, ended),
    )


def find(name: str, runs_dir: Path) -> RunRecord:
    """The run of this name, of a unique beginning of one, or in this folder; raises ConfigError otherwise."""
    if os.sep in name and (Path(name) / "spec.json").exists():
        return read(Path(name).resolve())
    names = [path.name for path in run_dirs(runs_dir)]
    matches = [n for n in names if n == name] or [n for n in names if n.startswith(name)]
    if len(matches) == 1:
        return read(runs_dir.resolve() / matches[0])
    if matches:
        raise ConfigError([f"{name}: more than one run begins so: {', '.join(matches)}."])
    some = f" The newest there: {', '.join(names[-3:])}." if names else " There are no runs there."
    raise ConfigError([f"{name}: there is no such run in {runs_dir.resolve()}.{some}"])


def run_dirs(runs_dir: Path) -> list[Path]:
    """Folders of runs, oldest first."""
    if not runs_dir.is_dir():
        return []
    found = [path for path in runs_dir.iterdir() if (path / "spec.json").exists()]
    return sorted(found, key=lambda path: ((path / "spec.json").stat().st_mtime, path.name))


def command(verb: str, record: RunRecord) -> str:
    """The command line of a verb for this run, from this working folder, as a shell takes it."""
    runs_dir = record.run_dir.parent
    where = [] if runs_dir == Path("runs").resolve() else ["--runs-dir", str(runs_dir)]
    return f"python -m orchestrator {verb} {shlex.join([record.name, *where])}"


def alive(node: NodeRecord) -> bool:
    """Whether the watcher's process still runs; True for one on another machine, which cannot be seen."""
    if node.host != socket.gethostname():
        return True
    try:
        process = psutil.Process(node.pid)
        return abs(process.create_time() - node.process_start) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def this_process(leased: tuple[str, ...] = (), rank_pids: tuple[int, ...] = ()) -> NodeRecord:
    """The record of the process that calls."""
    return NodeRecord(
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=psutil.Process().create_time(),
        leased=leased,
        rank_pids=rank_pids,
    )


def write(path: Path, record: Spec) -> None:
    """Write a record aside, then rename it."""
    write_json(path, record.model_dump_json(indent=2) + "\n")


def _read(path: Path, record: type[_Record]) -> _Record | None:
    try:
        return record.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise _unreadable(path, error) from error


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _unreadable(path, error) from error
    assert isinstance(plan, dict)
    return plan


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = "; ".join(line.strip() for line in str(error).splitlines()[:3])
    return ConfigError([f"{path}: it is damaged, or was not written by this version ({reason})."])


def _last_step(path: Path) -> StepReport | None:
    """The last complete line; the half line of a killed writer is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return StepReport.model_validate_json(line)
        except ValidationError:
            continue
    return None


def _state(submission: Submission | None, node: NodeRecord | None, watched: bool, ended: ExitRecord | None) -> State:
    if submission is None:
        return "planned"
    if ended is not None:
        return ended.cause if ended.cause in ("completed", "budget", "cancelled") else "failed"
    if node is not None:
        if not watched:
            return "lost"
        return "running" if node.rank_pids else "queued"
    return "submitted" if _age_s(submission) < _START_S else "lost"


def _age_s(submission: Submission) -> float:
    return time.time() - submission.submitted_at
