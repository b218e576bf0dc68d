"""Trains a grid of configs on this machine's GPU and sets the allocator's peaks beside the predictions.

`python tests/gpu/measure.py` takes at most eight minutes and writes tests/evidence/<card>.csv, a row a config, each
trained for three steps in a process of its own. Started again it goes on where it ended. `--again --output FILE`
measures nothing and sets fresh predictions beside the rows of that file. The card should be free: device bytes count
whoever is on it. One file, so that it can be read as a whole before it is let loose on somebody's card.

Tried on CPU alone (`--device cpu`, tests/test_gpu_measure.py): no GPU has run it yet.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.config import compose_jobs
from orchestrator.device import resolve, visible_gpus
from orchestrator.memory.formula import estimate
from train.loss import batch_loss
from train.measure import MemoryMeter
from train.optim import build_optimizer, clip_gradients
from train.parallel import build_sharded
from train.rank import _join
from train.spec import DeviceSpec, TrainSpec

GIB = 1024**3
_EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
_SHARE = 0.8
"""Of the card's bytes, what the largest configs are predicted to take."""
_STEPS = 3
_LARGEST_MICRO_BATCH = 512
_FIGURES = tuple(f"{phase}_{kind}" for phase in ("init", "first", "steady") for kind in ("allocated", "reserved"))
_COLUMNS = (
    *("name", "torch", "outcome", "detail", "overrides", "step_time_s"),
    *(f"{who}_{figure}_bytes" for figure in _FIGURES for who in ("predicted", "measured")),
    *("predicted_device_bytes", "measured_device_bytes", "besides_bytes"),
    *("error_allocated", "error_reserved", "error_device", "device"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One config of the grid."""

    name: str
    overrides: tuple[str, ...]
    fill: bool = False
    """Whether the micro-batch is the largest that is predicted to take `_SHARE` of the card."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process left; bytes, None where nobody measured."""

    outcome: str
    """ran, out_of_memory, timed_out or failed."""
    detail: str
    torch: str
    figures: Mapping[str, int | None]
    device_bytes: int | None
    """Reserved at its peak and all else on the card; on cpu the peak resident set."""
    besides_bytes: int | None
    """The card's used bytes less the reserved: context and libraries."""
    step_time_s: float | None


Measure = Callable[[TrainSpec, float], Measured]
"""Trains a spec in at most so many seconds."""


# The grid.

_POLICIES = {
    "none": ("ckpt=none",),
    "full": ("ckpt=full",),
    "selective": ("ckpt=selective", "ckpt.every=2"),
    "ops": ("ckpt=ops", "ckpt.save=every_second_matmul"),
}
_GELU = ("model=mega",)
_LLAMA = ("model=qwen3_0_6b", "train.seq_len=2048")
_MIXED, _BF16, _CHUNKED = "train.precision=bf16_mixed", "train.precision=bf16", "train.loss=chunked"


def cases() -> list[Case]:
    """All of them, the most telling first: what is left when the time is up is missed least."""
    found = [
        *_policies("llama mixed", (*_LLAMA, _MIXED), fill=True),
        *_policies("gelu fp32", (*_GELU, "train.micro_batch=8"), fill=False),
        *_policies("llama mixed chunked", (*_LLAMA, _MIXED, _CHUNKED), fill=True, only=("none", "full")),
        *_policies("gelu mixed", (*_GELU, _MIXED), fill=True),
        *_policies("llama bf16", (*_LLAMA, _BF16), fill=True, only=("none", "ops")),
    ]
    for impl in ("foreach", "forloop", "fused"):
        # One short sequence: the optimizer step is then the peak.
        words = ("model=qwen3_0_6b", "train.seq_len=128", "train.micro_batch=1", "ckpt=full", f"optim.impl={impl}")
        found.append(Case(name=f"llama mixed {impl} step", overrides=(*words, _MIXED)))
    large = ("model=llama3_2_1b", "train.seq_len=4096", _MIXED)
    found += [
        *_policies("large mixed", large, fill=True, only=("full", "ops")),
        Case(
            name="large bf16 chunked full",
            overrides=("model=llama3_8b", "train.micro_batch=1", _BF16, _CHUNKED, "ckpt=full"),
        ),
        Case(name="llama mixed accumulating", overrides=(*_LLAMA, _MIXED, "train.micro_batch=4", "train.grad_accum=2")),
        Case(
            name="gelu math attention",
            overrides=(*_GELU, _MIXED, "train.micro_batch=8", "model.attention=math", "ckpt=none"),
        ),
        Case(name="gelu mixed dropout", overrides=(*_GELU, _MIXED, "train.micro_batch=8", "train.dropout=0.1")),
        Case(name="gelu bf16", overrides=(*_GELU, _BF16, "train.micro_batch=8", "ckpt=full")),
        *_policies("tiny fp32", ("model=tiny",), fill=False, only=("none", "full")),
    ]
    return found


def cpu_cases() -> list[Case]:
    """A few small ones, to try this file where there is no GPU."""
    small = ("model=tiny", "train.micro_batch=2", "train.seq_len=128")
    return [
        *_policies("cpu fp32", small, fill=False),
        Case(name="cpu mixed chunked", overrides=(*small, _MIXED, _CHUNKED)),
        Case(name="cpu accumulating", overrides=(*small, "train.grad_accum=2", "optim.impl=foreach")),
    ]


def _policies(name: str, words: tuple[str, ...], *, fill: bool, only: tuple[str, ...] = tuple(_POLICIES)) -> list[Case]:
    return [Case(name=f"{name} {policy}", overrides=(*words, *_POLICIES[policy]), fill=fill) for policy in only]


@cache
def composed(*overrides: str) -> TrainSpec:
    """The trainer's spec of these overrides."""
    (run,) = compose_jobs(list(overrides))
    return run.train


def spec_of(overrides: tuple[str, ...], device: DeviceSpec) -> TrainSpec:
    """The same, on this device."""
    return composed(*overrides).model_copy(update={"device": device})


def sized(case: Case, device: DeviceSpec) -> TrainSpec | None:
    """The case's spec; None where it has no prediction, or not even one sequence is to fit `_SHARE` of the card."""
    spec = spec_of(case.overrides, device)
    assert device.usable_bytes is not None
    most_bytes = int(device.usable_bytes * _SHARE)
    if not case.fill:
        return spec if _fits(spec, most_bytes) else None
    if not _fits(_with_batch(spec, 1), most_bytes):
        return None
    low, high = 1, _LARGEST_MICRO_BATCH
    while low < high:  # the largest that fits: memory grows with the micro-batch
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(_with_batch(spec, middle), most_bytes) else (low, middle - 1)
    return _with_batch(spec, low)


def _with_batch(spec: TrainSpec, micro_batch: int) -> TrainSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"micro_batch": micro_batch})})


def _fits(spec: TrainSpec, most_bytes: int) -> bool:
    peak = estimate(spec).peak_device_bytes
    return peak is not None and peak <= most_bytes


# One process.


def measure_in_process(spec: TrainSpec, timeout_s: float) -> Measured:
    """Train it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file, result_file = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
        command = [sys.executable, __file__, "--child", str(spec_file), str(result_file)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=timeout_s, text=True
            )
        except subprocess.TimeoutExpired:
            return _nothing("timed_out", f"not done after {timeout_s:.0f} s")
        if result_file.exists():
            return Measured(**json.loads(result_file.read_text(encoding="utf-8")))
    lines = done.stderr.strip().splitlines()
    return _nothing("failed", f"exit code {done.returncode}: {lines[-1] if lines else 'it said nothing'}")


def _nothing(outcome: str, detail: str, torch: str = "") -> Measured:
    return Measured(
        outcome=outcome,
        detail=detail,
        torch=torch,
        figures=dict.fromkeys(_FIGURES),
        device_bytes=None,
        besides_bytes=None,
        step_time_s=None,
    )


def child(spec_file: Path, result_file: Path) -> None:
    """Build, train `_STEPS` steps as train/loop.py does, and leave a Measured as JSON."""
    spec = TrainSpec.model_validate_json(spec_file.read_text(encoding="utf-8"))
    figures: dict[str, int | None] = dict.fromkeys(_FIGURES)
    try:
        measured = _train(spec, figures)
    except torch.OutOfMemoryError as error:
        first_line = str(error).splitlines()[0]
        nothing = _nothing("out_of_memory", first_line, torch.__version__)
        measured = Measured(**{**vars(nothing), "figures": figures})
    result_file.write_text(json.dumps(vars(measured)), encoding="utf-8")


def _train(spec: TrainSpec, figures: dict[str, int | None]) -> Measured:
    device = _join(spec, 600.0)
    meter = MemoryMeter(device)
    module = build_sharded(spec, device)
    optimizer = build_optimizer(module, spec.optim)
    _note(figures, "init", meter)
    times = []
    for step in range(_STEPS):
        begin = time.perf_counter()
        _step(spec, module, optimizer, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        _note(figures, "first" if step == 0 else "steady", meter)
    besides = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        besides = total - free - torch.cuda.memory_reserved(device)
    device_bytes = meter.peak_device_bytes() if besides is None else besides + (figures["steady_reserved"] or 0)
    dist.destroy_process_group()
    return Measured(
        outcome="ran",
        detail="",
        torch=torch.__version__,
        figures=figures,
        device_bytes=device_bytes,
        besides_bytes=besides,
        step_time_s=round(statistics.median(times[1:]), 4),
    )


def _note(figures: dict[str, int | None], phase: str, meter: MemoryMeter) -> None:
    """Peaks of the phase that has just ended; the next one's start from here."""
    allocated, reserved = meter.peak_allocated_bytes(), meter.peak_reserved_bytes()
    if allocated is None or reserved is None:
        return
    figures[f"{phase}_allocated"] = max(allocated, figures[f"{phase}_allocated"] or 0)
    figures[f"{phase}_reserved"] = max(reserved, figures[f"{phase}_reserved"] or 0)
    torch.cuda.reset_peak_memory_stats()


def _step(spec: TrainSpec, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """One optimizer step on random tokens, as the loop makes it."""
    total = torch.zeros((), device=device)
    for _ in range(spec.train.grad_accum):
        tokens = torch.randint(0, spec.model.vocab_size, (spec.train.micro_batch, spec.train.seq_len + 1))
        inputs, targets = tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
        loss = batch_loss(spec.train, module, inputs, targets) / spec.train.grad_accum
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if spec.optim.clip_norm is not None:
        clip_gradients(module.parameters(), spec.optim.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# The file.


def row_of(name: str, overrides: tuple[str, ...], spec: TrainSpec, measured: Measured) -> dict[str, Any]:
    """A line of the file: measured and predicted, and predicted over measured less one."""
    row: dict[str, Any] = {
        "name": name,
        "torch": measured.torch,
        "outcome": measured.outcome,
        "detail": measured.detail,
        "overrides": " ".join(overrides),
        "step_time_s": measured.step_time_s,
        "measured_device_bytes": measured.device_bytes,
        "besides_bytes": measured.besides_bytes,
        "device": spec.device.model_copy(update={"sources": {}}).model_dump_json(),
    }
    row |= {f"measured_{figure}_bytes": value for figure, value in measured.figures.items()}
    return row | predictions(spec, row)


def predictions(spec: TrainSpec, row: Mapping[str, Any]) -> dict[str, Any]:
    """Fresh predictions and errors for a row that has its measurements."""
    found = estimate(spec)
    predicted = {
        "init_allocated": found.phases["init"],
        "init_reserved": None,  # no formula: the loader of a model is no phase of a step
        "first_allocated": found.first_step_peak_allocated_bytes,
        "first_reserved": found.first_step_peak_reserved_bytes,
        "steady_allocated": found.peak_allocated_bytes,
        "steady_reserved": found.peak_reserved_bytes,
    }
    columns: dict[str, Any] = {f"predicted_{figure}_bytes": value for figure, value in predicted.items()}
    columns["predicted_device_bytes"] = found.peak_device_bytes
    for error, figure in (("allocated", "steady_allocated"), ("reserved", "steady_reserved"), ("device", "device")):
        ours, theirs = columns[f"predicted_{figure}_bytes"], row[f"measured_{figure}_bytes"]
        columns[f"error_{error}"] = f"{ours / int(theirs) - 1:+.4f}" if ours and theirs else None
    return columns


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows that are there; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """All rows, written aside and renamed: an interrupted write leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    aside.rename(path)


def run_grid(
    grid: list[Case],
    device: DeviceSpec,
    path: Path,
    *,
    budget_s: float,
    measure: Measure = measure_in_process,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Measure what the file lacks until the time is up, a line a case; rows are written as they come.

    No case is started that would not be done in time if it took as long as the longest so far.
    """
    begin, longest_s = clock(), 0.0
    rows: list[dict[str, Any]] = [dict(row) for row in read_rows(path)]
    done = {row["name"] for row in rows if row["outcome"] in ("ran", "out_of_memory")}
    for number, case in enumerate(grid, start=1):
        head = f"[{number}/{len(grid)}] {case.name:<28}"
        if case.name in done:
            yield f"{head} in the file"
            continue
        left_s = budget_s - (clock() - begin)
        if left_s <= longest_s:
            yield f"{head} left out: {max(0.0, left_s):.0f} s left, the longest took {longest_s:.0f} s"
            continue
        spec = sized(case, device)
        if spec is None:
            yield f"{head} left out: more than {_SHARE:.0%} of {device.name}, or no formula for it there"
            continue
        started = clock()
        words = (word for word in case.overrides if not word.startswith("train.micro_batch="))
        overrides = (*words, f"train.micro_batch={spec.train.micro_batch}")
        row = row_of(case.name, overrides, spec, measure(spec, left_s))
        longest_s = max(longest_s, clock() - started)
        rows = [other for other in rows if other["name"] != case.name] + [row]
        write_rows(path, rows)
        yield f"{head} {_summary(row)}  {clock() - started:.0f} s"


def _summary(row: Mapping[str, Any]) -> str:
    if row["outcome"] != "ran":
        return f"{row['outcome']}: {row['detail']}"
    parts = []
    for kind, figure in (("allocated", "steady_allocated"), ("reserved", "steady_reserved"), ("device", "device")):
        measured, predicted = row[f"measured_{figure}_bytes"], row[f"predicted_{figure}_bytes"]
        if measured:
            beside = f"{predicted / GIB:.2f} ({float(row[f'error_{kind}']):+.1%})" if predicted else "unknown"
            parts.append(f"{kind} {measured / GIB:.2f} GiB, predicted {beside}")
    return "  ".join(parts)


def predict_again(path: Path) -> str:
    """Fresh predictions for the measurements of the file."""
    rows: list[dict[str, Any]] = [dict(row) for row in read_rows(path)]
    for row in rows:
        spec = spec_of(tuple(row["overrides"].split(" ")), DeviceSpec.model_validate_json(row["device"]))
        row |= predictions(spec, row)
    write_rows(path, rows)
    return errors(rows)


def errors(rows: list[dict[str, Any]]) -> str:
    """Median and worst error of each kind, and how many rows ran."""
    lines = [f"{sum(1 for row in rows if row['outcome'] == 'ran')} of {len(rows)} rows ran"]
    for kind in ("allocated", "reserved", "device"):
        found = [float(row[f"error_{kind}"]) for row in rows if row[f"error_{kind}"] not in (None, "")]
        if found:
            worst = max(found, key=abs)
            lines.append(f"{kind:<9} median |error| {statistics.median(map(abs, found)):.1%}, worst {worst:+.1%}")
    return "\n".join(lines)


def main() -> int:
    """Exit code: 0, or 2 where there is nothing to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a few small configs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no longer than this in all")
    parser.add_argument("--output", type=Path, help="the file; tests/evidence/<card>.csv")
    parser.add_argument("--again", action="store_true", help="measure nothing, predict anew")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        child(*words.child)
        return 0
    if words.again:
        if words.output is None or not words.output.exists():
            print("--again reads the file that --output names", file=sys.stderr)
            return 2
        print(predict_again(words.output))
        return 0
    if words.device == "cuda" and not visible_gpus():
        print("this machine shows no GPU: nothing to measure. --device cpu tries a few small configs", file=sys.stderr)
        return 2
    device = resolve(composed(f"device={'cpu' if words.device == 'cpu' else 'auto'}")).device
    path = words.output or _EVIDENCE / f"{device.name}.csv"
    grid = cpu_cases() if words.device == "cpu" else cases()
    for line in run_grid(grid, device, path, budget_s=words.minutes * 60):
        print(line, flush=True)
    print(errors([dict(row) for row in read_rows(path)]), f"written: {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
