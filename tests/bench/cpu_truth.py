"""Predicted against measured growth of a CPU rank's resident set, over a grid of real training runs.

`python -m tests.bench.cpu_truth` starts each row through the trainer (`python -m train`), as many processes as the row
has ranks, and writes a line for each to tests/evidence/cpu_truth.csv. Predicted is what the formula adds to the
baseline, tensors and workspace; measured is the growth of VmHWM of rank 0 since before its model was built.
`--only WORD` runs the rows whose name holds the word, `--resume` leaves out what the file has already, `--again` runs
nothing and sets fresh predictions beside the measurements of the file, `--live` counts the live tensors of the rows
too (tests/live_bytes.py), which tells whether the formula or the resident set is at fault.
"""

import argparse
import csv
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from orchestrator.device import resolve
from orchestrator.memory.estimate import MemoryEstimate
from orchestrator.memory.formula import estimate
from tests.specs import train_spec
from train.report import TrainReport, read_steps
from train.spec import TrainSpec

MIB = 1024**2
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "tests" / "evidence" / "cpu_truth.csv"
# Below it the baseline's own noise and the few MiB that a first matrix product takes are per cents by themselves.
FLOOR_BYTES = 300 * MIB
COMMON = (
    "device=cpu",
    "data=text",
    "budget.max_steps=2",
    "train.eval.sequences=1",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
)
_CONTEXT_WORDS = 150_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the grid."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What one run left; bytes of rank 0."""

    returncodes: tuple[int, ...]
    """Of the ranks; negative: the signal that ended one."""
    report: TrainReport | None
    """None: the run did not finish."""
    growth_before_saving_bytes: int | None
    """VmHWM growth after the last step, before the checkpoint was written."""
    seconds: float
    last_lines: str
    """What rank 0 printed last."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of the evidence."""

    name: str
    overrides: str
    torch_version: str
    threads: int
    """Of each rank."""
    peak_instant: str
    predicted_tensors_bytes: int | None
    predicted_growth_bytes: int | None
    """Tensors and workspace; None: the formula says unknown."""
    measured_growth_bytes: int
    error: float | None
    """Predicted over measured, less one."""
    live_tensors_bytes: int | None
    """Peak of the tensors alive, of the same step taken apart; None: not counted."""
    growth_before_saving_bytes: int
    baseline_bytes: int
    predicted_baseline_bytes: int
    seconds: float


def _gelu(layers: int, width: int, batch: int, context: int, *more: str) -> tuple[str, ...]:
    """GPT-2's family: layer norm, gelu, learned positions, tied head; heads of 64, or 32 below a width of 512."""
    head = 64 if width >= 512 else 32
    heads = width // head
    return (
        "model=tiny",
        *_sizes(layers, width, batch, context),
        f"model.num_heads={heads}",
        f"model.num_kv_heads={heads}",
        f"model.head_dim={head}",
        f"model.d_mlp={4 * width}",
        *more,
    )


def _swiglu(layers: int, width: int, batch: int, context: int, *more: str) -> tuple[str, ...]:
    """Llama's family: RMS norm, swiglu, rotary positions, untied head, four query heads a key-value head."""
    heads = width // 64
    return (
        "model=tinyllama_1b",
        *_sizes(layers, width, batch, context),
        f"model.num_heads={heads}",
        f"model.num_kv_heads={max(1, heads // 4)}",
        "model.head_dim=64",
        f"model.d_mlp={width * 11 // 4}",
        "model.vocab_size=8192",
        *more,
    )


def _sizes(layers: int, width: int, batch: int, context: int) -> tuple[str, ...]:
    return (
        f"model.num_layers={layers}",
        f"model.d_model={width}",
        f"model.context_length={context}",
        f"train.micro_batch={batch}",
        f"train.seq_len={context}",
    )


_TWO = "parallel.devices_per_node=2"
_MIXED = "train.precision=bf16_mixed"
_BF16 = "train.precision=bf16"
_MATH = "model.attention=math"
_CHUNKED = "train.loss=chunked"
_ACCUM = "train.grad_accum=2"
_OPS2 = ("ckpt=ops", "ckpt.save=every_second_matmul")
_ATTENTION = ("ckpt=ops", "ckpt.save=attention")

GRID = tuple(
    Row(name=name, overrides=overrides)
    for name, overrides in {
        # one rank, GPT-2's family: every policy on one shape, then other shapes
        "g4x128": _gelu(4, 128, 16, 128),
        "g4x128-long": _gelu(4, 128, 16, 1024),
        "g12x256": _gelu(12, 256, 16, 512),
        "g12x256-full": _gelu(12, 256, 16, 512, "ckpt=full"),
        "g12x256-every2": _gelu(12, 256, 16, 512, "ckpt=selective", "ckpt.every=2"),
        "g12x256-first4": _gelu(12, 256, 16, 512, "ckpt=selective", "ckpt.first=4"),
        "g12x256-last4": _gelu(12, 256, 16, 512, "ckpt=selective", "ckpt.last=4"),
        "g12x256-layers": _gelu(12, 256, 16, 512, "ckpt=selective", "ckpt.layers=[0,5,11]"),
        "g12x256-ops-attention": _gelu(12, 256, 16, 512, *_ATTENTION),
        "g12x256-ops-matmul": _gelu(12, 256, 16, 512, *_OPS2),
        "g12x256-ops-list": _gelu(12, 256, 16, 512, "ckpt=ops", "ckpt.save=[qkv,o]"),
        "g12x256-ops-up-every3": _gelu(12, 256, 16, 512, "ckpt=ops", "ckpt.save=mlp_up", "ckpt.every=3"),
        "g8x256-math": _gelu(8, 256, 4, 512, _MATH),
        "g8x256-math-full": _gelu(8, 256, 4, 512, _MATH, "ckpt=full"),
        "g8x256-math-ops": _gelu(8, 256, 4, 512, _MATH, *_ATTENTION),
        "g24x512": _gelu(24, 512, 2, 1024),
        "g24x512-full": _gelu(24, 512, 2, 1024, "ckpt=full"),
        "g24x512-ops-matmul": _gelu(24, 512, 2, 1024, *_OPS2),
        "g24x512-mixed": _gelu(24, 512, 2, 1024, _MIXED),
        "g24x512-bf16": _gelu(24, 512, 2, 1024, _BF16),
        "g24x512-b4": _gelu(24, 512, 4, 1024),
        "g16x1024": _gelu(16, 1024, 1, 256),
        "g16x1024-foreach": _gelu(16, 1024, 1, 128, "optim.impl=foreach"),
        "g8x1024-forloop": _gelu(8, 1024, 1, 128, "optim.impl=forloop"),
        "g8x1024-mixed": _gelu(8, 1024, 4, 256, _MIXED),
        "g12x512-accum": _gelu(12, 512, 4, 256, _ACCUM),
        "g12x512-accum-full": _gelu(12, 512, 8, 256, _ACCUM, "ckpt=full", "budget.max_steps=3"),
        "g8x512-dropout": _gelu(8, 512, 8, 256, "train.dropout=0.1"),
        "g4x384-vocab": _gelu(4, 384, 8, 256, "model.vocab_size=32000"),
        "g4x384-vocab-chunked": _gelu(4, 384, 8, 256, "model.vocab_size=32000", _CHUNKED),
        "g4x384-vocab-mixed": _gelu(4, 384, 8, 256, "model.vocab_size=32000", _MIXED),
        "g4x384-vocab-mixed-chunked": _gelu(4, 384, 8, 256, "model.vocab_size=32000", _MIXED, _CHUNKED),
        # one rank, Llama's family
        "s12x512": _swiglu(12, 512, 4, 512),
        "s12x512-full": _swiglu(12, 512, 4, 512, "ckpt=full"),
        "s12x512-every3": _swiglu(12, 512, 4, 512, "ckpt=selective", "ckpt.every=3"),
        "s12x512-ops-attention": _swiglu(12, 512, 4, 512, *_ATTENTION),
        "s12x512-ops-matmul": _swiglu(12, 512, 4, 512, *_OPS2),
        "s12x512-ops-list": _swiglu(12, 512, 4, 512, "ckpt=ops", "ckpt.save=[qkv,mlp_gate,mlp_up]"),
        "s12x512-mixed": _swiglu(12, 512, 4, 512, _MIXED),
        "s12x512-mixed-ops": _swiglu(12, 512, 4, 512, _MIXED, *_OPS2),
        "s12x512-bf16": _swiglu(12, 512, 8, 512, _BF16),
        "s16x768": _swiglu(16, 768, 4, 512),
        "s8x512-qknorm": _swiglu(8, 512, 8, 256, "model.qk_norm=true"),
        "s8x512-qknorm-tied-mixed": _swiglu(
            8, 512, 8, 256, "model.qk_norm=true", "model.tie_embeddings=true", _MIXED, _CHUNKED
        ),
        "s8x256-math": _swiglu(8, 256, 4, 512, _MATH),
        "s8x256-math-mixed": _swiglu(8, 256, 4, 512, _MATH, _MIXED),
        "s4x256-small": _swiglu(4, 256, 2, 128, "model.vocab_size=256"),
        # two ranks
        "g12x512-2": _gelu(12, 512, 4, 512, _TWO),
        "g12x512-2-full": _gelu(12, 512, 4, 512, _TWO, "ckpt=full"),
        "g12x512-2-shardnone": _gelu(12, 512, 4, 256, _TWO, "parallel.shard=none"),
        "g12x512-2-hsdp": _gelu(12, 512, 4, 256, "parallel.nodes=2", "parallel.shard=hsdp"),
        "g8x1024-2-never": _gelu(8, 1024, 1, 256, _TWO, "parallel.reshard_after_forward=never"),
        "g8x1024-2-foreach": _gelu(8, 1024, 1, 128, _TWO, _ACCUM, "optim.impl=foreach"),
        "s12x512-2-always": _swiglu(12, 512, 4, 256, _TWO, "parallel.reshard_after_forward=always", *_OPS2),
        "s12x512-2-mixed-never": _swiglu(12, 512, 4, 256, _TWO, _MIXED, "parallel.reshard_after_forward=never"),
        "s8x512-2-chunked": _swiglu(8, 512, 8, 256, _TWO, _CHUNKED, "model.vocab_size=16000", "ckpt=full"),
    }.items()
)


def text_file(folder: Path) -> Path:
    """About a megabyte of words in this folder: enough for any row, and read in no time."""
    path = folder / "text.txt"
    path.write_text(" ".join(f"{i * 7919 % 100_003:x}" for i in range(_CONTEXT_WORDS)), encoding="ascii")
    return path


def specify(overrides: Sequence[str], text: Path) -> TrainSpec:
    """The spec of these overrides for this machine; raises ConfigError as the launcher does."""
    return resolve(train_spec(*COMMON, f"data.path={text}", *overrides))


def run(
    spec: TrainSpec,
    run_dir: Path,
    prefix: Sequence[str] = (),
    watch: Callable[[int], None] = lambda pid: None,
) -> Ended:
    """Train with as many processes as the spec plans ranks.

    `prefix` is a command that executes the words after it; `watch` is told rank 0's process id twenty times a second.
    """
    world = spec.parallel.world_size
    run_dir.mkdir(parents=True)
    spec_file = run_dir / "spec.json"
    spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
    begin = time.perf_counter()
    command = [*prefix, sys.executable, "-m", "train", str(spec_file), str(run_dir)]
    logs = [(run_dir / f"rank{rank}.log").open("w+", encoding="utf-8") for rank in range(world)]
    port = _free_port()
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(rank, world, port),
            stdin=subprocess.DEVNULL,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    returncodes = _wait(ranks, watch)
    seconds = time.perf_counter() - begin
    for log in logs:
        log.close()
    report = run_dir / "report.1.json"
    steps = read_steps(run_dir / "steps.jsonl")
    return Ended(
        returncodes=returncodes,
        report=TrainReport.model_validate_json(report.read_text(encoding="utf-8")) if report.exists() else None,
        growth_before_saving_bytes=steps[-1].rss_growth_bytes if steps else None,
        seconds=seconds,
        last_lines=(run_dir / "rank0.log").read_text(encoding="utf-8")[-500:],
    )


def _wait(ranks: list[subprocess.Popen[bytes]], watch: Callable[[int], None]) -> tuple[int, ...]:
    """Exit codes; once one rank failed the others, which would wait for it, are killed."""
    while any(rank.poll() is None for rank in ranks):
        watch(ranks[0].pid)
        if any(rank.poll() not in (None, 0) for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return tuple(rank.wait() for rank in ranks)


def threads(world: int) -> int:
    """Threads of each rank, as the launcher gives them: an even share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // world)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What the launcher sets for a rank on CPU (orchestrator/launch/node.py)."""
    return dict(os.environ) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads(world)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def growth_bytes(predicted: MemoryEstimate, spec: TrainSpec) -> int | None:
    """What the prediction adds to the baseline: tensors and workspace."""
    context = spec.device.context_bytes
    assert context is not None  # resolved
    return None if predicted.peak_device_bytes is None else predicted.peak_device_bytes - context


def _measure(row: Row, spec: TrainSpec, run_dir: Path) -> Measured:
    ended = run(spec, run_dir)
    report = ended.report
    if report is None:
        raise SystemExit(f"{row.name}: the run ended with {ended.returncodes}:\n{ended.last_lines}")
    assert report.rss_growth_bytes is not None
    assert report.rss_baseline_bytes is not None
    assert ended.growth_before_saving_bytes is not None
    return Measured(
        name=row.name,
        overrides=" ".join(row.overrides),
        torch_version=report.torch_version,
        threads=threads(spec.parallel.world_size),
        peak_instant="",
        predicted_tensors_bytes=None,
        predicted_growth_bytes=None,
        measured_growth_bytes=report.rss_growth_bytes,
        error=None,
        live_tensors_bytes=None,
        growth_before_saving_bytes=ended.growth_before_saving_bytes,
        baseline_bytes=report.rss_baseline_bytes,
        predicted_baseline_bytes=spec.device.context_bytes or 0,
        seconds=round(ended.seconds, 1),
    )


def _predicted(measured: Measured, spec: TrainSpec) -> Measured:
    """The line with what the formula says beside the measurement."""
    found = estimate(spec)
    growth = growth_bytes(found, spec)
    return replace(
        measured,
        peak_instant=f"{found.peak_phase}: {found.peak_instant}" if growth else f"unknown: {found.unknown[0].key}",
        predicted_tensors_bytes=found.peak_allocated_bytes,
        predicted_growth_bytes=growth,
        error=None if growth is None else round(growth / measured.measured_growth_bytes - 1, 5),
    )


def _live_tensors_bytes(spec: TrainSpec, folder: Path) -> int:
    """Peak of live tensors of rank 0, counted in processes of their own."""
    spec_file = folder / "live.json"
    spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
    world, port = spec.parallel.world_size, _free_port()
    command = [sys.executable, "-m", "tests.bench.cpu_truth", "--count-live", str(spec_file)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=_environment(rank, world, port), stdout=subprocess.PIPE)
        for rank in range(world)
    ]
    output = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"the live tensors could not be counted: exit codes {[rank.returncode for rank in ranks]}")
    peaks = json.loads(output[0].splitlines()[-1])
    predicted = estimate(spec).phases
    print("    live tensors (and predicted), MiB:", end="")
    for phase, peak in peaks.items():
        says = predicted.get(phase)
        print(f"  {phase} {peak / MIB:.1f} ({'unknown' if says is None else f'{says / MIB:.1f}'})", end="")
    print(flush=True)
    return int(max(peaks.values()))


def _count_live(spec_file: Path) -> None:
    import torch.distributed as dist  # late: the grid itself does without torch

    from tests.live_bytes import step_peaks  # late: imports torch

    spec = TrainSpec.model_validate_json(spec_file.read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    print(json.dumps(step_peaks(spec)), flush=True)
    dist.destroy_process_group()


def read(path: Path) -> dict[str, Measured]:
    """The lines of the evidence by name; empty where there is no file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {line["name"]: _parse(line) for line in csv.DictReader(file)}


def _parse(line: dict[str, str]) -> Measured:
    def number(name: str) -> int | None:
        return int(line[name]) if line[name] else None

    return Measured(
        name=line["name"],
        overrides=line["overrides"],
        torch_version=line["torch_version"],
        threads=int(line["threads"]),
        peak_instant=line["peak_instant"],
        predicted_tensors_bytes=number("predicted_tensors_bytes"),
        predicted_growth_bytes=number("predicted_growth_bytes"),
        measured_growth_bytes=int(line["measured_growth_bytes"]),
        error=float(line["error"]) if line["error"] else None,
        live_tensors_bytes=number("live_tensors_bytes"),
        growth_before_saving_bytes=int(line["growth_before_saving_bytes"]),
        baseline_bytes=int(line["baseline_bytes"]),
        predicted_baseline_bytes=int(line["predicted_baseline_bytes"]),
        seconds=float(line["seconds"]),
    )


def _write(path: Path, lines: dict[str, Measured]) -> None:
    """In the grid's order."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measured)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(lines[row.name]) for row in GRID if row.name in lines)


def _line(measured: Measured) -> str:
    predicted = measured.predicted_growth_bytes
    says = "unknown" if predicted is None else f"{predicted / MIB:8.1f}"
    error = "" if measured.error is None else f"{measured.error:+7.2%}"
    live = measured.live_tensors_bytes
    counted = "" if live is None else f"  live tensors {live / MIB:.1f}"
    tensors = measured.predicted_tensors_bytes
    of = "" if tensors is None else f" (tensors {tensors / MIB:.1f})"
    return (
        f"{measured.name:<27} predicted {says}{of}  measured {measured.measured_growth_bytes / MIB:8.1f}  {error}"
        f"{counted}  [{measured.peak_instant}] {measured.seconds:.0f} s"
    )


def summary(errors: Sequence[float]) -> str:
    """Median, 95th percentile (nearest rank) and worst of the absolute errors."""
    if not errors:
        return "no rows"
    ordered = sorted(abs(error) for error in errors)
    p95 = ordered[max(0, -(-95 * len(ordered) // 100) - 1)]
    return f"{len(ordered)} rows: median {statistics.median(ordered):.2%}, p95 {p95:.2%}, worst {ordered[-1]:.2%}"


def _print_summary(lines: Sequence[Measured]) -> None:
    known = [(line, line.error) for line in lines if line.error is not None]
    print("above 300 MiB  ", summary([error for line, error in known if line.measured_growth_bytes >= FLOOR_BYTES]))
    print("below 300 MiB  ", summary([error for line, error in known if line.measured_growth_bytes < FLOOR_BYTES]))
    unknown = [line.name for line in lines if line.error is None]
    if unknown:
        print("without formula", len(unknown), "rows:", ", ".join(unknown))


def _chosen(only: str, lines: dict[str, Measured], leave_out: bool) -> Iterator[Row]:
    for row in GRID:
        if only in row.name and not (leave_out and row.name in lines):
            yield row


def main(argv: Sequence[str]) -> None:
    """The bench; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cpu_truth")
    parser.add_argument("--only", default="", help="the rows whose name holds this word")
    parser.add_argument("--resume", action="store_true", help="leave out the rows that the file has")
    parser.add_argument("--again", action="store_true", help="run nothing, predict the measured rows again")
    parser.add_argument("--live", action="store_true", help="count live tensors too")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    parser.add_argument("--count-live", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.count_live is not None:
        return _count_live(chosen.count_live)
    lines = read(chosen.out)
    with tempfile.TemporaryDirectory(prefix="cpu-truth-") as folder:
        text = text_file(Path(folder))
        for row in _chosen(chosen.only, lines, chosen.resume):
            if chosen.again and row.name not in lines:
                continue
            spec = specify(row.overrides, text)
            run_dir = Path(folder) / row.name
            found = lines[row.name] if chosen.again else _measure(row, spec, run_dir)
            shutil.rmtree(run_dir, ignore_errors=True)
            if chosen.live:
                found = replace(found, live_tensors_bytes=_live_tensors_bytes(spec, Path(folder)))
            lines[row.name] = _predicted(found, spec)
            print(_line(lines[row.name]), flush=True)
            _write(chosen.out, lines)
    _print_summary([lines[row.name] for row in GRID if row.name in lines])
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
