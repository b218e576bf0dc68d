"""One rank of a launched run: reads the frozen spec, trains, and on rank 0 starts the tracker.

`python -m orchestrator.launch.worker RUN_DIR ATTEMPT WATCHER_PID`, with RANK and its kin in the environment.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator import tracking
from orchestrator.launch.folder import CORPUS_FILE
from orchestrator.launch.stopping import Asked
from orchestrator.spec import RunSpec
from train.corpus import Corpus
from train.report import StepReport


def work(
    run_dir: Path, attempt: int, asked: Callable[[], bool], on_step: Callable[[StepReport], None] | None = None
) -> int:
    """Train as the rank that the environment names; its exit code.

    `asked`: whether the process was asked to stop before the trainer took the signals over. `on_step` shows the steps,
    which are printed where there is none.
    """
    from train.rank import run_rank  # late: imports torch, which the launcher does without

    spec = RunSpec.model_validate_json((run_dir / "spec.json").read_text(encoding="utf-8"))
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    corpus = Corpus.model_validate_json((run_dir / CORPUS_FILE).read_text(encoding="utf-8"))
    tracker = tracking.start(run_dir, attempt, spec) if os.environ.get("RANK", "0") == "0" else None

    def after_step(report: StepReport) -> None:
        if on_step is not None:
            on_step(report)
        if asked():
            signal.raise_signal(signal.SIGTERM)  # what came too early for the trainer, which listens now

    def after() -> None:
        warning = None if tracker is None else tracker.finish(spec.tracking.timeout_s)
        if warning is not None:
            print(f"warning: {warning}", flush=True)

    return run_rank(
        spec.train,
        run_dir,
        attempt=attempt,
        corpus=corpus,
        predicted_peak_bytes=plan["estimate"]["peak_device_bytes"],
        collective_timeout_s=spec.launch.collective_timeout_s,
        on_step=after_step,
        say_steps=on_step is None,
        after=after,
    )


def _die_with(watcher_pid: int) -> None:
    """Have the kernel kill this rank when its watcher is gone (Linux prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != watcher_pid:  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _die_with(int(sys.argv[3]))
    code = work(Path(sys.argv[1]), int(sys.argv[2]), Asked())
    with contextlib.suppress(OSError):  # what cannot be written, on a full disk, must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a rank whose peers died must not wait for them in an exit handler
