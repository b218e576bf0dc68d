"""Runs on this machine through submitit's local executor, detached from the terminal that submits.

Takes a planned run folder, gives a Submission. `python -m orchestrator.launch.local RUN_DIR` is the step in
between that gives the executor's controller a session of its own: Ctrl-C and a closed shell do not reach it.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import submitit
from submitit.core.utils import environment_variables

from orchestrator.device import check_present, visible_gpus
from orchestrator.errors import ConfigError, NotSubmittedError
from orchestrator.launch import node
from orchestrator.launch.freeze import Frozen
from orchestrator.launch.lease import folder_of
from orchestrator.ledger import Submission, write
from orchestrator.spec import RunSpec
from train.spec import Problem

_NO_TIMEOUT_MIN = 60 * 24 * 365.0


def plan_submission(spec: RunSpec, attempt: int, command: tuple[str, ...], frozen: Frozen) -> Submission:
    """What will be started; raises NotSubmittedError or ConfigError where this machine cannot."""
    check_machine(spec)
    on_gpu = spec.train.device.kind == "cuda"
    ranks = spec.train.parallel.world_size
    if on_gpu:
        candidates, leases, threads = tuple(f"gpu:{name}" for name in visible_gpus()), ranks, None
    else:
        slots = cpu_slots(spec)
        threads = spec.launch.cpus_per_rank or max(1, slots // ranks)
        candidates, leases = tuple(f"cpu:{i}" for i in range(slots)), ranks * threads
    return Submission(
        attempt=attempt,
        kind=spec.launch.kind,
        submitted_at=time.time(),
        command=command,
        job_id=None,
        commit=frozen.commit,
        dirty=bool(frozen.patch),
        code=str(frozen.code),
        candidates=candidates,
        leases=leases,
        threads_per_rank=threads,
    )


def cpu_slots(spec: RunSpec) -> int:
    """CPU slots of this machine, as configured or the cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return spec.launch.cpu_slots or allowed


def check_machine(spec: RunSpec) -> None:
    """Refuse what this machine cannot start: other nodes, missing GPUs, more ranks than slots, no room for leases."""
    folder_of(spec.launch.lease_dir)
    parallel = spec.train.parallel
    if parallel.nodes > 1:
        raise _refused(
            "parallel.nodes",
            parallel.nodes,
            f"launch={spec.launch.kind} is this machine alone",
            "Set it to 1",
        )
    if spec.launch.kind == "inline" and parallel.world_size > 1:
        fix = "Set it to 1, or use launch=local"
        raise _refused(
            "parallel.devices_per_node",
            parallel.devices_per_node,
            "launch=inline is one rank in this process",
            fix,
        )
    check_present(spec.train)
    if spec.train.device.kind == "cuda":
        return
    slots, per_rank = cpu_slots(spec), spec.launch.cpus_per_rank or 1
    if parallel.devices_per_node * per_rank > slots:
        raise _refused(
            "parallel.devices_per_node",
            parallel.devices_per_node,
            f"each rank leases {per_rank} of this machine's {slots} CPU slots",
            f"Set it to at most {slots // per_rank}, or launch.cpu_slots="
            f"{parallel.devices_per_node * per_rank} to share the cores",
        )


def _refused(key: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=str(value), why=why, fix=fix)])


def submit(run_dir: Path, submission: Submission) -> Submission:
    """Write submission.json, start the run, and write the job's id; raises NotSubmittedError, then nothing runs."""
    try:
        write(run_dir / "submission.json", submission)
    except OSError as error:
        raise NotSubmittedError(f"{run_dir} cannot be written ({error.strerror}). Nothing was started.") from error
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.launch.local", str(run_dir)],
        env=dict(os.environ) | node.source_environment(submission.code),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotSubmittedError(f"submitit could not start the run in {run_dir}: {last}. Nothing was started.")
    submitted = submission.model_copy(update={"job_id": done.stdout.strip()})
    with contextlib.suppress(OSError):  # the run goes on without its id in the record; a full disk ends it soon enough
        write(run_dir / "submission.json", submitted)
    return submitted


def _start_controller(run_dir: Path) -> str:
    executor = submitit.LocalExecutor(folder=run_dir / "submitit", python=shlex.quote(sys.executable))
    executor.update_parameters(timeout_min=_NO_TIMEOUT_MIN, tasks_per_node=1, stderr_to_stdout=True)
    with environment_variables(PYTHONUNBUFFERED="1"):
        job = executor.submit(node.run, str(run_dir))
    return str(job.job_id)


if __name__ == "__main__":
    # The controller outlives this process, so it must not hold the pipes that the launcher reads to their end.
    own_stdout = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 1)
    os.set_inheritable(own_stdout, False)
    stderr_copy = os.dup(2)
    os.dup2(quiet, 2)
    try:
        job_id = _start_controller(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher prints it in one line
        os.write(stderr_copy, f"{type(error).__name__}: {error}\n".encode())
        raise SystemExit(1) from None
    os.write(own_stdout, job_id.encode())
