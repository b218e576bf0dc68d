"""A run in this very process, one rank: for a debugger.

Takes a planned run folder and its Submission, gives the exit code. The code is the working tree's, not the copy.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.launch.cause import RankEnd, cancelled_in_the_queue, cause_of
from orchestrator.launch.lease import StoppedWaitingError
from orchestrator.launch.node import lease_of, rank_environment
from orchestrator.launch.stopping import Asked
from orchestrator.ledger import ExitRecord, Submission, this_process, write
from orchestrator.spec import RunSpec
from train.report import StepReport

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLOO_SOCKET_IFNAME")

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(run_dir: Path, spec: RunSpec, submission: Submission, on_step: Callable[[StepReport], None]) -> ExitRecord:
    """Lease, train to the end, write exit.<attempt>.json; raises OSError where the folder cannot be written."""
    asked = Asked()
    write(run_dir / "submission.json", submission)
    write(run_dir / f"node.{submission.attempt}.json", this_process())
    try:
        ended = _attempt(run_dir, spec, submission, asked, on_step)
    except StoppedWaitingError:
        ended = cancelled_in_the_queue()
    write(run_dir / f"exit.{submission.attempt}.json", ended)
    return ended


def _attempt(
    run_dir: Path,
    spec: RunSpec,
    submission: Submission,
    asked: Callable[[], bool],
    on_step: Callable[[StepReport], None],
) -> ExitRecord:
    with lease_of(spec, submission, asked) as leased:
        write(run_dir / f"node.{submission.attempt}.json", this_process(leased.ids, (os.getpid(),)))
        environment = rank_environment(submission, leased.ids)
        os.environ.update({name: environment[name] for name in _VARIABLES if name in environment})
        for name in _RANK_VARIABLES:  # one rank, also inside a torchrun or a Slurm job
            os.environ.pop(name, None)
        from orchestrator.launch.worker import work  # late: imports torch, after CUDA_VISIBLE_DEVICES is set

        code = work(run_dir, submission.attempt, asked, on_step)
    return cause_of(
        run_dir, submission.attempt, [RankEnd(rank=0, returncode=code, time=time.time(), killed_by_us=False)]
    )
