"""The watcher of one machine: waits for a lease, starts the ranks, ends them together, says how it went.

Runs as a submitit task, from the frozen source. Takes a run folder and the attempt, gives the run's exit code and
exit.<attempt>.json. It must not import torch.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.launch.cause import RankEnd, cancelled_in_the_queue, cause_of, watcher_failed
from orchestrator.launch.lease import Lease, StoppedWaitingError, folder_of, lease
from orchestrator.launch.stopping import Asked, kept_for_the_child
from orchestrator.ledger import ExitRecord, Submission, this_process, write
from orchestrator.spec import RunSpec

_POLL_S = 0.02
_GRACE_S = 3.0
"""After a rank died, the others may take this long to say what they saw."""
_RESERVE_BYTES = 1 << 16
"""Kept free for the record of the ending: a run that fills its disk must still say so."""


def run(run_dir_name: str) -> int:
    """Watch the newest attempt of this run to its end; the exit code of the run."""
    run_dir = Path(run_dir_name)
    spec = RunSpec.model_validate_json((run_dir / "spec.json").read_text(encoding="utf-8"))
    text = (run_dir / "submission.json").read_text(encoding="utf-8")
    submission = Submission.model_validate_json(text)
    asked = Asked()
    reserve = run_dir / f".exit.{submission.attempt}.reserve"
    try:
        reserve.write_bytes(b"\0" * _RESERVE_BYTES)
        ended = _attempt(run_dir, spec, submission, asked)
    except StoppedWaitingError:
        ended = cancelled_in_the_queue()
    except OSError as error:
        ended = watcher_failed(run_dir, error)
    reserve.unlink(missing_ok=True)
    write(run_dir / f"exit.{submission.attempt}.json", ended)
    return ended.exit_code


def _attempt(run_dir: Path, spec: RunSpec, submission: Submission, asked: Callable[[], bool]) -> ExitRecord:
    """Queue, start the ranks, watch them; raises StoppedWaitingError and OSError, and leaves no rank behind."""
    record = run_dir / f"node.{submission.attempt}.json"
    write(record, this_process())
    ranks: list[subprocess.Popen[bytes]] = []
    with lease_of(spec, submission, asked) as leased:
        env = _world_environment(spec, submission, leased)
        (run_dir / "logs").mkdir(exist_ok=True)
        try:
            for rank in range(spec.train.parallel.world_size):
                # One by one: those that run are killed where the next one cannot be started.
                ranks.append(_start_rank(run_dir, submission.attempt, rank, env, leased))  # noqa: PERF401
            write(record, this_process(leased.ids, tuple(p.pid for p in ranks)))
            ends = _watch(ranks, asked, _stop_timeout_s(spec))
        finally:
            _signal(ranks, signal.SIGKILL)
    return cause_of(run_dir, submission.attempt, ends)


def lease_of(
    spec: RunSpec, submission: Submission, asked: Callable[[], bool]
) -> contextlib.AbstractContextManager[Lease]:
    """The run's place in the queue, then what it leases, inside the block; raises StoppedWaitingError."""
    return lease(
        submission.candidates,
        submission.leases,
        folder=folder_of(spec.launch.lease_dir),
        submitted_at=submission.submitted_at,
        stop_requested=asked,
    )


def _stop_timeout_s(spec: RunSpec) -> float:
    """What a run asked to stop may take: its checkpoint, then its tracker."""
    return spec.launch.cancel_timeout_s + (spec.tracking.timeout_s if spec.tracking.kind == "wandb" else 0.0)


def _world_environment(spec: RunSpec, submission: Submission, leased: Lease) -> dict[str, str]:
    world = str(spec.train.parallel.world_size)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return rank_environment(submission, leased.ids) | meeting | {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}


def _start_rank(run_dir: Path, attempt: int, rank: int, env: dict[str, str], leased: Lease) -> subprocess.Popen[bytes]:
    """The rank's process, in a group of its own; it holds the lease too, until it is gone."""
    words = ["-u", "-m", "orchestrator.launch.worker", str(run_dir), str(attempt), str(os.getpid())]
    with log_file(run_dir, attempt, rank).open("ab") as log, kept_for_the_child():
        return subprocess.Popen(
            [sys.executable, *words],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=leased.descriptors,
        )


def log_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """What a rank printed in an attempt."""
    return run_dir / "logs" / f"attempt{attempt}.rank{rank}.log"


def rank_environment(submission: Submission, leased: Sequence[str]) -> dict[str, str]:
    """This environment with the leased devices, the threads, and the frozen source to import from."""
    env = dict(os.environ) | source_environment(submission.code)
    gpus = [name.removeprefix("gpu:") for name in leased if name.startswith("gpu:")]
    env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if submission.threads_per_rank is not None:
        env["OMP_NUM_THREADS"] = str(submission.threads_per_rank)
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve each other's ranks
        loopback = "lo" if sys.platform == "linux" else "lo0"
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the host's name may resolve to an address gloo cannot use
    return env


def source_environment(code: str) -> dict[str, str]:
    """For a process that imports this source, before whatever else PYTHONPATH names."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", code)]
    return {"PYTHONPATH": os.pathsep.join([code, *others]), "PYTHONSAFEPATH": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(ranks: list[subprocess.Popen[bytes]], asked: Callable[[], bool], stop_timeout_s: float) -> list[RankEnd]:
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
