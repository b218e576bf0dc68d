"""The life of one rank: process group, signals, data, training, and a record of how it failed.

Takes a TrainSpec, a run folder and the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
(one rank where they are not set), gives an exit code. Used by `python -m train` and by the launcher.
"""

import contextlib
import datetime
import errno
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from train.checkpoint import CheckpointError
from train.corpus import Corpus, DataError, prepare
from train.loop import Surroundings, TrainError, train
from train.measure import return_freed_memory
from train.report import StepReport, TrainReport, write_json
from train.spec import TrainSpec

DONE, CONFIG_ERROR, FAILED = 0, 2, 7


def failure_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """Where a rank says how it failed."""
    return run_dir / f"failure.{attempt}.rank{rank}.json"


class StopFlag:
    """Set by SIGTERM, SIGINT and SIGUSR2; read by the loop once a step."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def install(self) -> None:
        """Take the signals over; a second SIGINT acts at once, as usual."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> bool:
        """Whether one of them came."""
        return self.signal is not None


def run_rank(
    spec: TrainSpec,
    run_dir: Path,
    *,
    attempt: int = 1,
    corpus: Corpus | None = None,
    predicted_peak_bytes: int | None = None,
    collective_timeout_s: float = 600.0,
    on_step: Callable[[StepReport], None] = lambda report: None,
    say_steps: bool = True,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Train as the rank that the environment names; 0 done, 2 config error, 7 failed.

    What went wrong is printed and left in failure.<attempt>.rank<r>.json. `after` runs on rank 0 when the report
    is written, or the failure.
    """
    rank, world = _int_variable("RANK", 0), _int_variable("WORLD_SIZE", 1)
    stop = StopFlag()
    stop.install()
    try:
        if world != spec.parallel.world_size:
            raise TrainError(f"{world} ranks were started for a plan of {spec.parallel.world_size}")
        device = _join(spec, collective_timeout_s)
        here = Surroundings(
            run_dir=run_dir,
            attempt=attempt,
            device=device,
            corpus=corpus or _corpus(spec, run_dir),
            predicted_peak_bytes=predicted_peak_bytes,
            stop_requested=stop,
            on_step=_also_said(on_step) if say_steps else on_step,
            say=_say if rank == 0 else lambda line: None,
        )
        report = train(spec, here)
        if rank == 0:
            write_json(run_dir / f"report.{attempt}.json", report.model_dump_json(indent=2))
            _say(_ending_line(report))
        dist.barrier()
        dist.destroy_process_group()
        return DONE
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is recorded, then the rank ends
        _record_failure(run_dir, attempt, rank, error)
        return CONFIG_ERROR if isinstance(error, DataError) else FAILED
    finally:
        if rank == 0:
            after()


def _also_said(on_step: Callable[[StepReport], None]) -> Callable[[StepReport], None]:
    def both(report: StepReport) -> None:
        held_out = "" if report.eval_loss is None else f"  held-out loss {report.eval_loss:.4f}"
        _say(f"step {report.step}  loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s{held_out}")
        on_step(report)

    return both


def _ending_line(report: TrainReport) -> str:
    return f"{report.outcome} after step {report.steps}: {report.stop_reason}"


def _say(line: str) -> None:
    print(line, flush=True)


def _int_variable(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _join(spec: TrainSpec, timeout_s: float) -> torch.device:
    """Join the process group: nccl on GPUs, gloo on CPU."""
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), RANK="0", WORLD_SIZE="1")
    on_gpu = spec.device.kind == "cuda" or (spec.device.kind == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = torch.device("cuda", _int_variable("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its workspace is in no formula; flash is
    else:
        device = torch.device("cpu")
        return_freed_memory()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _corpus(spec: TrainSpec, run_dir: Path) -> Corpus:
    """Prepared by rank 0 of each machine, then read by the others."""
    cache = run_dir / "data"
    if _int_variable("LOCAL_RANK", 0) == 0:
        prepare(spec.data, spec.model, spec.train.seq_len, cache)
    dist.barrier()
    return prepare(spec.data, spec.model, spec.train.seq_len, cache)


def _record_failure(run_dir: Path, attempt: int, rank: int, error: BaseException) -> None:
    explanation = _explanation(run_dir, error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    record = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__ if explanation else kind,
        "message": explanation or str(error) or kind,
        "explained": explanation is not None,
        "out_of_memory": isinstance(error, torch.OutOfMemoryError | MemoryError),
    }
    _complain(explanation or "".join(traceback.format_exception(error)))
    try:
        write_json(failure_file(run_dir, attempt, rank), json.dumps(record))
    except OSError as full:
        _complain(f"the record of this failure could not be written: {full}")


def _explanation(run_dir: Path, error: BaseException) -> str | None:
    """What a user can do about it; None where nobody knows."""
    if isinstance(error, TrainError | CheckpointError | DataError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or run_dir}: {error.strerror}. Free space there, then resume."
    return None


def _complain(text: str) -> None:
    """To stderr; where that is a file on a full disk, the exit code must still be told."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
