"""What a training run says of itself: a StepReport a step, a TrainReport an attempt.

Takes values from the loop, gives JSON in the run folder. It must not import torch.
"""

import errno
import json
import os
from pathlib import Path
from typing import Literal

from train.spec import Spec

STEPS_FILE = "steps.jsonl"


class StepReport(Spec):
    """One optimizer step; one line of steps.jsonl. Bytes are of rank 0; null: not measured."""

    attempt: int
    step: int
    """Optimizer steps done, this one included; counted from 1 over all attempts."""
    tokens: int
    """Training tokens seen, over all ranks and attempts."""
    loss: float
    """Mean training loss over all ranks, nats per token."""
    lr: float
    grad_norm: float | None
    """Norm of all gradients before clipping; null without clipping."""
    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs, without recomputation, as a share of the devices' peak; null: peak not known."""
    peak_allocated_bytes: int | None
    """Peak of the CUDA allocator since the start of the attempt; null on cpu."""
    peak_reserved_bytes: int | None
    """Peak of what the CUDA allocator took from the device; null on cpu."""
    rss_growth_bytes: int | None
    """Growth of the peak resident set (VmHWM) since before the model was built; null on cuda."""
    peak_device_bytes: int | None
    """Peak that the process takes of its device: what the prediction is of."""
    eval_loss: float | None
    """Held-out loss after this step, nats per token; null where there was no evaluation."""
    eval_nats_per_byte: float | None
    """The same per byte of text."""
    wall_time_s: float
    """Seconds of training over all attempts."""


class TrainReport(Spec):
    """How an attempt ended; report.<attempt>.json."""

    attempt: int
    outcome: Literal["completed", "budget", "stopped"]
    """completed: the planned steps are done; budget: another limit came first; stopped: asked to stop."""
    stop_reason: str
    """The limit that ended it, by its config key, or that it was asked to stop."""
    steps: int
    tokens: int
    first_loss: float | None
    """Training loss of this attempt's first step; null when it made none."""
    final_loss: float | None
    final_eval_loss: float | None
    final_eval_nats_per_byte: float | None
    predicted_peak_bytes: int | None
    """Predicted peak of one device (peak_device_bytes of the estimate)."""
    measured_peak_bytes: int | None
    """Peak of rank 0: on cpu the peak resident set, on cuda reserved bytes plus context."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    rss_baseline_bytes: int | None
    """Resident set before the model was built; null on cuda."""
    rss_growth_bytes: int | None
    tokens_per_s: float | None
    """Median over the attempt's steps."""
    wall_time_s: float
    """Seconds of training over all attempts."""
    device_hours: float
    """Hours times devices over all attempts."""
    checkpoint: str | None
    """Newest complete checkpoint, relative to the run folder."""
    data_fingerprint: str
    """Of the training tokens."""
    eval_fingerprint: str
    """Of the held-out tokens."""
    torch_version: str
    world_size: int


def write_json(path: Path, text: str) -> None:
    """Write aside, flush to disk, rename: readers see the whole file or none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)  # on a full disk its bytes are missed
        raise


def append_step(path: Path, step: StepReport) -> None:
    """One flushed line, written by one call, so that a kill leaves no half line but the last.

    A half line that a kill or a full disk left is ended first, or this one would be lost with it.
    """
    line = (step.model_dump_json() + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_steps(path: Path) -> list[StepReport]:
    """All complete lines; of steps written twice (after a resume) the later attempt's."""
    if not path.exists():
        return []
    by_step: dict[int, StepReport] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            json.loads(line)
        except ValueError:
            continue  # the half line of a killed writer
        report = StepReport.model_validate_json(line)
        by_step[report.step] = report
    return [by_step[step] for step in sorted(by_step)]


def read_report(run_dir: Path, attempt: int) -> TrainReport | None:
    """The report of this attempt, or None where it left none."""
    path = run_dir / f"report.{attempt}.json"
    if not path.exists():
        return None
    return TrainReport.model_validate_json(path.read_text(encoding="utf-8"))
