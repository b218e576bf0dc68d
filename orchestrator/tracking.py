"""The run's way to wandb, beside the training and never in its way.

`start` gives a Tracker whose sidecar process (`python -m orchestrator.tracking RUN_DIR ATTEMPT PARENT_PID`) watches
the run folder and starts one wandb_sidecar after another: online where that works, else offline. steps.jsonl is the
truth; the sidecar writes tracking.<attempt>.json. It must not import torch or wandb.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from orchestrator.project import SOURCE_ROOT
from orchestrator.spec import RunSpec
from train.report import STEPS_FILE, write_json
from train.spec import Spec

Mode = Literal["online", "offline", "disabled"]
WANDB_ID_FILE = "wandb_id"
_POLL_S = 0.1
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class WriterState(Spec):
    """What a wandb_sidecar says of itself, one JSON line each time it changes."""

    mode: Mode | None
    """Where it writes; null: wandb could not be imported, or did not get so far."""
    folder: str | None
    """Folder with wandb's files of this run."""
    url: str | None
    """Page of the run; null when it is offline."""
    problem: str | None
    """Why it failed, in one line."""


class TrackingRecord(Spec):
    """Where the metrics of an attempt are, besides the run folder; tracking.<attempt>.json."""

    mode: Mode | None
    """Where they were written; null: nowhere."""
    folder: str | None
    """Folder with wandb's files of this attempt; one of an offline run is sent by `wandb sync FOLDER`."""
    url: str | None
    """Page of the run; null when it is offline."""
    warning: str | None
    """What went wrong and what to set, in one sentence; null when nothing did."""


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """A started sidecar, or the reason why none could be started."""

    run_dir: Path
    attempt: int
    sidecar: subprocess.Popen[bytes] | None
    problem: str = ""

    def finish(self, timeout_s: float) -> str | None:
        """Wait for the sidecar to end, at most this long, then kill it; a warning of one sentence, or None.

        To be called when the attempt's report or failure is written. It never raises.
        """
        if self.sidecar is None:
            return _warning(self.run_dir, self.attempt, self.problem)
        try:
            code = self.sidecar.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill_tree(self.sidecar)
            return _warning(self.run_dir, self.attempt, f"wandb was stopped: it took more than {timeout_s:g} s to end")
        except KeyboardInterrupt:
            _kill_tree(self.sidecar)
            return _warning(self.run_dir, self.attempt, "wandb was stopped before it had ended")
        try:
            text = record_file(self.run_dir, self.attempt).read_text(encoding="utf-8")
            warning = TrackingRecord.model_validate_json(text).warning
        except (OSError, ValueError):
            return _warning(self.run_dir, self.attempt, f"the tracking process ended with {code} and left no record")
        return warning


def record_file(run_dir: Path, attempt: int) -> Path:
    """Where the sidecar says what became of an attempt's metrics."""
    return run_dir / f"tracking.{attempt}.json"


def log_file(run_dir: Path, attempt: int) -> Path:
    """What the sidecar and wandb printed in an attempt."""
    return run_dir / "logs" / f"tracking.attempt{attempt}.log"


def start(run_dir: Path, attempt: int, spec: RunSpec, env: Mapping[str, str] | None = None) -> Tracker | None:
    """Start the sidecar of an attempt in a session of its own; None where tracking is none.

    `env` is its environment, this process's by default. It returns at once and never raises because of wandb.
    """
    if spec.tracking.kind == "none":
        return None
    run_dir = run_dir.resolve()
    log = log_file(run_dir, attempt)
    try:
        record_file(run_dir, attempt).unlink(missing_ok=True)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            sidecar = subprocess.Popen(
                [sys.executable, "-u", "-m", "orchestrator.tracking", str(run_dir), str(attempt), str(os.getpid())],
                env=_environment(os.environ if env is None else env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        problem = f"the tracking process could not be started ({error})"
        return Tracker(run_dir=run_dir, attempt=attempt, sidecar=None, problem=problem)
    return Tracker(run_dir=run_dir, attempt=attempt, sidecar=sidecar)


def supervise(run_dir: Path, attempt: int, parent_pid: int) -> TrackingRecord:
    """Write the attempt to wandb until it has ended: online if that works, else offline. The sidecar's work."""
    spec = RunSpec.model_validate_json((run_dir / "spec.json").read_text(encoding="utf-8"))
    ending = _Ending(run_dir, attempt, parent_pid, spec.tracking.timeout_s)
    first = _Writer(run_dir, attempt, "auto")
    if first.follow(ending):
        return _record(first.state)
    if first.state.mode != "online":
        return _record(first.state, _warning(run_dir, attempt, f"wandb did not work ({first.problem})"))
    print(f"tracking: online failed ({first.problem}); writing offline", flush=True)
    second = _Writer(run_dir, attempt, "offline")
    if second.follow(ending):
        return _record(second.state, _unsent_warning(run_dir, first.problem, second.state.folder))
    problem = f"wandb did not work ({first.problem}; then, offline: {second.problem})"
    return _record(second.state, _warning(run_dir, attempt, problem))


class _Ending:
    """Whether training has ended, and how long ago; parts of the time limit count from there."""

    def __init__(self, run_dir: Path, attempt: int, parent_pid: int, timeout_s: float) -> None:
        self._signs = (run_dir / f"report.{attempt}.json", run_dir / f"failure.{attempt}.rank0.json")
        self._parent_pid = parent_pid
        self._since: float | None = None
        # Rank 0 waits timeout_s from its report on: the record must be there a little before.
        self.limit_s = timeout_s - min(1.0, timeout_s / 10)

    def passed_s(self) -> float | None:
        """Seconds since training ended; None while it goes on."""
        # An orphan gets another parent, so a reused pid cannot be taken for rank 0.
        if self._since is None and (os.getppid() != self._parent_pid or any(sign.exists() for sign in self._signs)):
            self._since = time.monotonic()
        return None if self._since is None else time.monotonic() - self._since


class _Writer:
    """One wandb_sidecar process; its stdin is closed when training has ended, its stdout says its state."""

    def __init__(self, run_dir: Path, attempt: int, mode: Literal["auto", "offline"]) -> None:
        self.state = WriterState(mode=None, folder=None, url=None, problem=None)
        self.problem = ""
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "orchestrator.wandb_sidecar", str(run_dir), str(attempt), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""

    def follow(self, ending: _Ending) -> bool:
        """Wait for it to end; kill it when its part of the time is up. Whether it wrote the whole attempt."""
        assert self._process.stdin is not None
        while self._process.poll() is None:
            self._listen()
            passed_s = ending.passed_s()
            if passed_s is not None:
                self._process.stdin.close()
                # Half for the server, so that as much is left to write offline what it would not take.
                share_s = ending.limit_s / 2 if self.state.mode == "online" else ending.limit_s
                if passed_s > share_s:
                    _kill_tree(self._process)
                    self.problem = f"it did not end in {share_s:.0f} s"
                    return False
            time.sleep(_POLL_S)
        self._listen()
        self.problem = self.state.problem or f"its process ended with {self._process.returncode}"
        return self._process.returncode == 0

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self._heard += self._process.stdout.read() or b""
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self.state = WriterState.model_validate_json(line)


def _record(state: WriterState, warning: str | None = None) -> TrackingRecord:
    return TrackingRecord(mode=state.mode, folder=state.folder, url=state.url, warning=warning)


def _unsent_warning(run_dir: Path, problem: str, folder: str | None) -> str:
    return (
        f"wandb could not send this run to its server ({problem}); every step is in {run_dir / STEPS_FILE} and in "
        f"{folder}, to be sent later by `wandb sync {folder}`: set WANDB_MODE=offline or tracking=none where there is "
        "no server."
    )


def _warning(run_dir: Path, attempt: int, problem: str) -> str:
    return (
        f"{problem}; every step is in {run_dir / STEPS_FILE}, what wandb printed in {log_file(run_dir, attempt)}: "
        "set tracking=none to do without wandb, or WANDB_MODE=offline to do without its server."
    )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Without the rank's variables, and with this source first among what can be imported."""
    kept = {k: v for k, v in env.items() if k not in _RANK_VARIABLES and not k.startswith("MASTER_")}
    path = [str(SOURCE_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all it started: wandb-core is in a session of its own, so its group is not enough."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.Error:
            continue
    process.wait()


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    # wandb leaves folders behind wherever temporary files go.
    with tempfile.TemporaryDirectory(prefix="wandb-", ignore_cleanup_errors=True) as scratch:
        os.environ["TMPDIR"] = scratch
        record = supervise(folder, number, int(sys.argv[3]))
    write_json(record_file(folder, number), record.model_dump_json(indent=2) + "\n")
    where = f"`wandb sync {record.folder}` sends it" if record.mode == "offline" else record.url
    print(f"tracking: {record.warning or f'{record.mode}, {where}'}", flush=True)
