"""A run in this very process, one rank: for a debugger.

Takes a planned run folder and its Submission, gives the exit code. The code is the working tree's, not the copy.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.launch.cause import RankEnd, cause_of
from orchestrator.launch.lease import default_folder, lease
from orchestrator.launch.node import rank_environment
from orchestrator.ledger import ExitRecord, Submission, this_process, write
from orchestrator.spec import RunSpec
from train.report import StepReport


def run(run_dir: Path, spec: RunSpec, submission: Submission, on_step: Callable[[StepReport], None]) -> ExitRecord:
    """Lease, train to the end, write exit.<attempt>.json."""

    write(run_dir / "submission.json", submission)
    folder = default_folder() if spec.launch.lease_dir is None else Path(spec.launch.lease_dir)
    with lease(submission.candidates, submission.leases, folder=folder, submitted_at=submission.submitted_at) as leased:
        write(run_dir / f"node.{submission.attempt}.json", this_process(leased, (os.getpid(),)))
        environment = rank_environment(submission, leased)
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
            if name in environment:
                os.environ[name] = environment[name]
        from orchestrator.launch.worker import work  # late: imports torch, after CUDA_VISIBLE_DEVICES is set

        code = work(run_dir, submission.attempt, on_step)
    end = RankEnd(rank=0, returncode=code, time=time.time(), killed_by_us=False)
    ended = cause_of(run_dir, submission.attempt, [end])
    write(run_dir / f"exit.{submission.attempt}.json", ended)
    return ended
