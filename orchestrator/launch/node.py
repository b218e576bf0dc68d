"""The watcher of one machine: waits for a lease, starts the ranks, ends them together, says how it went.

Runs as a submitit task, from the frozen source. Takes a run folder and the attempt, gives the run's exit code and
exit.<attempt>.json. It must not import torch.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from orchestrator.errors import ExitCode
from orchestrator.launch.cause import RankEnd, cause_of
from orchestrator.launch.lease import StoppedWaitingError, default_folder, lease
from orchestrator.ledger import ExitRecord, Submission, this_process, write
from orchestrator.spec import RunSpec

_POLL_S = 0.02
_GRACE_S = 3.0
"""After a rank died, the others may take this long to say what they saw."""


class _Signals:
    """SIGTERM, SIGINT and SIGUSR2 ask the run to stop; kept until the ranks can be told."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()

    def __call__(self) -> bool:
        return self.asked_at is not None


def run(run_dir_name: str) -> int:
    """Watch the newest attempt of this run to its end; the exit code of the run."""
    run_dir = Path(run_dir_name)
    spec = RunSpec.model_validate_json((run_dir / "spec.json").read_text(encoding="utf-8"))
    text = (run_dir / "submission.json").read_text(encoding="utf-8")
    submission = Submission.model_validate_json(text)
    asked = _Signals()
    record = run_dir / f"node.{submission.attempt}.json"
    write(record, this_process())
    folder = default_folder() if spec.launch.lease_dir is None else Path(spec.launch.lease_dir)
    try:
        with lease(
            submission.candidates,
            submission.leases,
            folder=folder,
            submitted_at=submission.submitted_at,
            stop_requested=asked,
        ) as leased:
            ranks = _start_ranks(run_dir, spec, submission, leased)
            write(record, this_process(leased, tuple(p.pid for p in ranks)))
            ends = _watch(ranks, asked, _stop_timeout_s(spec))
        ended = cause_of(run_dir, submission.attempt, ends)
    except StoppedWaitingError:
        ended = ExitRecord(
            cause="cancelled",
            exit_code=ExitCode.DONE,
            detail="Cancelled while it was queued; no rank was started.",
            first_failed_rank=None,
            last_lines=(),
            ended_at=time.time(),
        )
    write(run_dir / f"exit.{submission.attempt}.json", ended)
    return ended.exit_code


def _stop_timeout_s(spec: RunSpec) -> float:
    """What a run asked to stop may take: its checkpoint, then its tracker."""
    return spec.launch.cancel_timeout_s + (spec.tracking.timeout_s if spec.tracking.kind == "wandb" else 0.0)


def _start_ranks(
    run_dir: Path, spec: RunSpec, submission: Submission, leased: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    world = spec.train.parallel.world_size
    env = rank_environment(submission, leased) | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    ranks = []
    for rank in range(world):
        with log_file(run_dir, submission.attempt, rank).open("ab") as log:
            ranks.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-u",
                        "-m",
                        "orchestrator.launch.worker",
                        str(run_dir),
                        str(submission.attempt),
                    ],
                    env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            )
    return ranks


def log_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """What a rank printed in an attempt."""
    return run_dir / "logs" / f"attempt{attempt}.rank{rank}.log"


def rank_environment(submission: Submission, leased: Sequence[str]) -> dict[str, str]:
    """This environment with the leased devices, the threads, and the frozen source to import from."""
    env = dict(os.environ) | {"PYTHONPATH": submission.code, "PYTHONSAFEPATH": "1"}
    gpus = [name.removeprefix("gpu:") for name in leased if name.startswith("gpu:")]
    env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if submission.threads_per_rank is not None:
        env["OMP_NUM_THREADS"] = str(submission.threads_per_rank)
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve each other's ranks
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve to an address gloo cannot use
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(ranks: list[subprocess.Popen[bytes]], asked: _Signals, stop_timeout_s: float) -> list[RankEnd]:
    """Wait for all ranks; a failed one ends the others, a request to stop is passed on."""
    ends: dict[int, RankEnd] = {}
    deadline: float | None = None
    told = killed = False
    while len(ends) < len(ranks):
        for rank, process in enumerate(ranks):
            code = process.poll()
            if code is not None and rank not in ends:
                ends[rank] = RankEnd(rank=rank, returncode=code, time=time.time(), killed_by_us=killed)
        if asked() and not told:
            told = True
            deadline = time.monotonic() + stop_timeout_s
            _signal(ranks, signal.SIGTERM)
        if any(end.returncode != 0 for end in ends.values()):
            soon = time.monotonic() + _GRACE_S
            deadline = soon if deadline is None else min(deadline, soon)
        if deadline is not None and time.monotonic() > deadline and not killed:
            killed = True
            _signal(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return list(ends.values())


def _signal(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue
