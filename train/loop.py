"""The training loop: steps until the budget, a signal or the plan ends them, with evaluation and checkpoints.

Takes a TrainSpec, a Corpus and the rank's surroundings, gives a TrainReport. Metrics leave through `on_step`,
on rank 0 only, so it knows no tracker.
"""

import hashlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train import checkpoint, shapes
from train.checkpoint import Progress
from train.corpus import Corpus
from train.data import Sequences
from train.ending import Agreed, Ending, Passes, ending_after, next_step_passes, planned_ending
from train.evaluation import evaluate, nats_per_byte
from train.loss import batch_loss
from train.measure import MemoryMeter
from train.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from train.parallel import build_sharded
from train.report import STEPS_FILE, StepReport, TrainReport, append_step, read_steps
from train.spec import TrainSpec


class TrainError(Exception):
    """Training cannot go on; the message says why and what to set."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a rank runs and whom it tells."""

    run_dir: Path
    """Run folder; steps.jsonl and checkpoints go there."""
    attempt: int
    """Starts of this run, this one included."""
    device: torch.device
    corpus: Corpus
    predicted_peak_bytes: int | None
    """Set beside the measured peak in the report; None: nobody predicted."""
    stop_requested: Callable[[], bool]
    """Whether this rank was asked to stop; asked once a step."""
    on_step: Callable[[StepReport], None]
    """Called on rank 0 after each step."""
    say: Callable[[str], None]
    """One line for a person, on rank 0."""


class _Attempt:
    """One start of a run: its module, optimizer and data, and how far it is."""

    def __init__(self, spec: TrainSpec, here: Surroundings) -> None:
        self.spec = spec
        self.here = here
        self.meter = MemoryMeter(here.device)
        self.module = build_sharded(spec, here.device)
        self.optimizer = build_optimizer(self.module, spec.optim)
        self.sequences = Sequences(here.corpus, spec.train.seq_len, spec.train.seed)
        self.progress = _start(here, self.module, self.optimizer)
        self.started = self.progress
        self.clock = time.perf_counter()
        self.reports: list[StepReport] = []
        self.saved: Path | None = None

    def run(self) -> Ending:
        ending = planned_ending(self.spec, self.progress)
        while ending is None:
            begin = time.perf_counter()
            loss, grad_norm, lr = self._step()
            if self.here.device.type == "cuda":
                torch.cuda.synchronize()  # the clock is to count what the device does, not what it was asked to do
            compute_time_s = time.perf_counter() - begin
            agreed = self._agree(loss, grad_norm, compute_time_s)
            self._advance(compute_time_s)
            ending = ending_after(self.spec, self.progress, agreed)
            step_time_s = time.perf_counter() - begin
            eval_loss = self._evaluate(ending)
            self._report_step(agreed.loss, grad_norm, lr, step_time_s, eval_loss)
            if ending is not None or self.progress.step % self.spec.checkpoint.every_steps == 0:
                self.saved = checkpoint.save(
                    self.here.run_dir, self.progress, self.module, self.optimizer, self.spec.checkpoint.keep
                )
        return ending

    def _step(self) -> tuple[Tensor, float | None, float]:
        """Forward and backward of all micro-batches, then the optimizer; the mean loss of this rank."""
        loop, rank, world = self.spec.train, dist.get_rank(), dist.get_world_size()
        lr = learning_rate(self.spec, self.progress.step + 1)
        set_learning_rate(self.optimizer, lr)
        if loop.dropout > 0:
            torch.manual_seed(_dropout_seed(loop.seed, self.progress.step + 1, rank))
        total = torch.zeros((), device=self.here.device)
        for micro in range(loop.grad_accum):
            first = self.progress.sequences + (micro * world + rank) * loop.micro_batch
            inputs, targets = self._to_device(self.sequences.train(first, loop.micro_batch))
            loss = batch_loss(loop, self.module, inputs, targets) / loop.grad_accum
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip = self.spec.optim.clip_norm
        grad_norm = None if clip is None else clip_gradients(self.module.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, grad_norm, lr

    def _agree(self, loss: Tensor, grad_norm: float | None, step_time_s: float) -> Agreed:
        """One all-reduce: the mean loss, whether any rank was asked to stop, and rank 0's clock."""
        passes = next_step_passes(self.spec, *self._spent(), step_time_s)
        is_first = float(dist.get_rank() == 0)
        flags = [float(self.here.stop_requested()), is_first * passes.wall_time, is_first * passes.device_hours]
        shared = torch.cat([loss.float().reshape(1), torch.tensor(flags, device=self.here.device)])
        dist.all_reduce(shared)
        total, stop, wall, hours = shared.tolist()
        mean = total / dist.get_world_size()
        _require_finite(f"the loss of step {self.progress.step + 1}", mean)
        _require_finite(f"the norm of the gradients of step {self.progress.step + 1}", grad_norm)
        return Agreed(loss=mean, stop=stop > 0, passes=Passes(wall_time=wall > 0, device_hours=hours > 0))

    def _spent(self) -> tuple[float, float]:
        """Seconds, and hours times devices, over all attempts."""
        elapsed = time.perf_counter() - self.clock
        hours = elapsed * dist.get_world_size() / 3600
        return self.started.wall_time_s + elapsed, self.started.device_hours + hours

    def _advance(self, step_time_s: float) -> None:
        wall_time_s, device_hours = self._spent()
        self.progress = Progress(
            step=self.progress.step + 1,
            sequences=self.progress.sequences + self.spec.sequences_per_step,
            tokens=self.progress.tokens + self.spec.tokens_per_step,
            wall_time_s=wall_time_s,
            device_hours=device_hours,
            step_time_s=step_time_s,
            data_fingerprint=self.progress.data_fingerprint,
        )

    def _evaluate(self, ending: Ending | None) -> float | None:
        """Held-out loss where one is due; a run that was asked to stop has no time for it."""
        if ending is not None and ending.outcome == "stopped":
            return None
        if ending is None and self.progress.step % self.spec.train.eval.every_steps:
            return None
        loss = evaluate(self.spec, self.module, self.sequences, self.here.device)
        _require_finite(f"the held-out loss after step {self.progress.step}", loss)
        return loss

    def _report_step(
        self, loss: float, grad_norm: float | None, lr: float, step_time_s: float, eval_loss: float | None
    ) -> None:
        if dist.get_rank() != 0:
            return
        spec = self.spec
        corpus = self.here.corpus
        report = StepReport(
            attempt=self.here.attempt,
            step=self.progress.step,
            tokens=self.progress.tokens,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            step_time_s=step_time_s,
            tokens_per_s=spec.tokens_per_step / step_time_s,
            mfu=_mfu(spec, step_time_s),
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            peak_reserved_bytes=self.meter.peak_reserved_bytes(),
            rss_growth_bytes=self.meter.rss_growth_bytes(),
            peak_device_bytes=self.meter.peak_device_bytes(),
            eval_loss=eval_loss,
            eval_nats_per_byte=None if eval_loss is None else nats_per_byte(eval_loss, corpus),
            wall_time_s=self.progress.wall_time_s,
        )
        self.reports.append(report)
        append_step(self.here.run_dir / STEPS_FILE, report)
        self.here.on_step(report)

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.here.device), batch[1].to(self.here.device)

    def report(self, ending: Ending) -> TrainReport:
        """The attempt as a whole, of rank 0."""
        evals = [r for r in self.reports if r.eval_loss is not None]
        wall_time_s, device_hours = self._spent()
        saved = self.saved or checkpoint.latest(self.here.run_dir)
        return TrainReport(
            attempt=self.here.attempt,
            outcome=ending.outcome,
            stop_reason=ending.reason,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            first_loss=self.reports[0].loss if self.reports else None,
            final_loss=self.reports[-1].loss if self.reports else None,
            final_eval_loss=evals[-1].eval_loss if evals else None,
            final_eval_nats_per_byte=evals[-1].eval_nats_per_byte if evals else None,
            predicted_peak_bytes=self.here.predicted_peak_bytes,
            measured_peak_bytes=self.meter.peak_device_bytes(),
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            peak_reserved_bytes=self.meter.peak_reserved_bytes(),
            rss_baseline_bytes=self.meter.rss_baseline_bytes,
            rss_growth_bytes=self.meter.rss_growth_bytes(),
            tokens_per_s=statistics.median(r.tokens_per_s for r in self.reports) if self.reports else None,
            wall_time_s=wall_time_s,
            device_hours=device_hours,
            checkpoint=None if saved is None else str(saved.relative_to(self.here.run_dir)),
            data_fingerprint=self.here.corpus.data_fingerprint,
            eval_fingerprint=self.here.corpus.eval_fingerprint,
            torch_version=torch.__version__,
            world_size=dist.get_world_size(),
        )


def train(spec: TrainSpec, here: Surroundings) -> TrainReport:
    """Train from the newest complete checkpoint, or from the start, to the first limit.

    Needs an initialised process group. Raises CheckpointError when a checkpoint cannot be written or read,
    TrainError when a loss or the norm of the gradients is not finite.
    """
    attempt = _Attempt(spec, here)
    try:
        return attempt.report(attempt.run())
    finally:
        attempt.sequences.close()


def _require_finite(what: str, value: float | None) -> None:
    """Raises TrainError before such a state reaches a checkpoint."""
    if value is not None and not math.isfinite(value):
        raise TrainError(
            f"{what} is {value}. Lower optim.lr, raise optim.warmup_steps or set optim.clip_norm, "
            "then resume from the checkpoint before it."
        )


def _start(here: Surroundings, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    found = checkpoint.latest(here.run_dir, here.say)
    if found is None:
        return Progress(
            step=0,
            sequences=0,
            tokens=0,
            wall_time_s=0.0,
            device_hours=0.0,
            step_time_s=0.0,
            data_fingerprint=here.corpus.data_fingerprint,
        )
    progress = checkpoint.read_progress(found)
    if progress.data_fingerprint != here.corpus.data_fingerprint:
        raise checkpoint.CheckpointError(
            f"{found} was made with other data (fingerprint {progress.data_fingerprint[:12]}, this run has "
            f"{here.corpus.data_fingerprint[:12]}). Restore the files of data.path, or start a new run."
        )
    here.say(f"continuing from {found.name}, {progress.tokens} tokens seen")
    return _with_time_lost(checkpoint.load(found, module, optimizer), here.run_dir)


def _with_time_lost(progress: Progress, run_dir: Path) -> Progress:
    """The progress of a checkpoint with the time of the steps that were made after it and are made again."""
    steps = read_steps(run_dir / STEPS_FILE)
    lost_s = max((s.wall_time_s for s in steps), default=0.0) - progress.wall_time_s
    if lost_s <= 0:
        return progress
    hours = progress.device_hours + lost_s * dist.get_world_size() / 3600
    return progress.model_copy(update={"wall_time_s": progress.wall_time_s + lost_s, "device_hours": hours})


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Of what a rank leaves out in a step: it depends on no step before, so that a resume leaves out the same."""
    digest = hashlib.sha256(f"{seed}/dropout/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _mfu(spec: TrainSpec, step_time_s: float) -> float | None:
    device = spec.device
    peak = device.peak_flops_fp32 if spec.train.precision == "fp32" else device.peak_flops_bf16
    if peak is None:
        return None
    flops = shapes.step_flops(spec.model, spec.train.micro_batch, spec.train.seq_len) * spec.train.grad_accum
    return flops / step_time_s / peak
