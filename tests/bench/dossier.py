"""The table of the README on eight shapes, with and without checkpointing: an old estimate, a new one, measurements.

`python -m tests.bench.dossier` trains the shapes of tests/evidence/dossier.csv that fit in this machine's free memory
(fp32, math attention, two steps on CPU), writes tests/evidence/dossier_measured.csv and prints the table. `--table`
prints it from that file, with fresh estimates, and runs nothing; `--only WORD` measures the shapes whose name holds
the word, as `behemoth-b1`. The old estimate and its measurements are another engine's on another device: MB of 10^6 or
2^20 bytes is not said there, and they stand beside ours as what they are.
"""

import argparse
import csv
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from orchestrator.memory.formula import estimate
from tests.bench import cpu_truth
from tests.bench.cpu_truth import MIB, growth_bytes, specify, text_file
from train.spec import TrainSpec

SHAPES = cpu_truth.ROOT / "tests" / "evidence" / "dossier.csv"
MEASURED = cpu_truth.ROOT / "tests" / "evidence" / "dossier_measured.csv"

Policy = Literal["none", "full"]
_POLICIES: tuple[Policy, ...] = ("none", "full")
_OTHER_ENGINE = {"none": "peak_mb_no_checkpointing", "full": "peak_mb_full_checkpointing"}
_OLD_ESTIMATE = "old_oomguard_estimate_mib_both_policies"
# Left to what else runs on the machine, and to the kernel's own use.
_SPARE_BYTES = 2048 * MIB


@dataclass(frozen=True, kw_only=True)
class Line:
    """One shape under one policy."""

    shape: str
    policy: Policy
    torch_version: str
    """Empty where nothing was measured."""
    measured_growth_bytes: int | None
    """VmHWM growth; None: not measured, see skipped."""
    seconds: float | None
    skipped: str
    """Why nothing was measured."""


def _shapes() -> dict[str, dict[str, str]]:
    with SHAPES.open(encoding="utf-8", newline="") as file:
        return {f"{r['model']}-b{r['micro_batch']}-t{r['seq_len']}": r for r in csv.DictReader(file)}


def _spec(shape: dict[str, str], policy: Policy, text: Path) -> TrainSpec:
    sizes = [f"model.{name}={shape[name]}" for name in ("num_layers", "d_model", "num_heads", "d_mlp", "vocab_size")]
    context = max(int(shape["context_length_max"]), int(shape["seq_len"]))
    words = [
        *(f"model={shape['model']}", *sizes, f"model.context_length={context}", "model.attention=math"),
        *(f"train.micro_batch={shape['micro_batch']}", f"train.seq_len={shape['seq_len']}"),
        *(f"train.precision={shape['precision']}", f"ckpt={policy}"),
    ]
    return specify(words, text)


def _measure(name: str, policy: Policy, spec: TrainSpec, folder: Path) -> Line:
    found = estimate(spec)
    usable = spec.device.usable_bytes
    assert found.peak_device_bytes is not None  # these settings all have a formula
    assert usable is not None  # resolved
    skipped, torch_version, measured, seconds = "", "", None, None
    if found.peak_device_bytes > usable - _SPARE_BYTES:
        skipped = f"not run: {usable / MIB:,.0f} MiB were free, and 2,048 are to stay so"
    else:
        ended = cpu_truth.run(spec, folder / "run")
        shutil.rmtree(folder / "run")
        if ended.report is None:
            raise SystemExit(f"{name}, ckpt={policy}: the run ended with {ended.returncodes}:\n{ended.last_lines}")
        torch_version, measured = ended.report.torch_version, ended.report.rss_growth_bytes
        seconds = round(ended.seconds, 1)
    return Line(
        shape=name,
        policy=policy,
        torch_version=torch_version,
        measured_growth_bytes=measured,
        seconds=seconds,
        skipped=skipped,
    )


def _read() -> dict[tuple[str, str], Line]:
    if not MEASURED.exists():
        return {}
    with MEASURED.open(encoding="utf-8", newline="") as file:
        return {(line["shape"], line["policy"]): _parse(line) for line in csv.DictReader(file)}


def _parse(line: dict[str, str]) -> Line:
    return Line(
        shape=line["shape"],
        policy="full" if line["policy"] == "full" else "none",
        torch_version=line["torch_version"],
        measured_growth_bytes=int(line["measured_growth_bytes"]) if line["measured_growth_bytes"] else None,
        seconds=float(line["seconds"]) if line["seconds"] else None,
        skipped=line["skipped"],
    )


def _write(lines: dict[tuple[str, str], Line]) -> None:
    with MEASURED.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(lines[name, p]) for name in _shapes() for p in _POLICIES if (name, p) in lines)


def _cells(name: str, shape: dict[str, str], policy: Policy, line: Line | None, predicted_bytes: int) -> list[str]:
    measured = None if line is None else line.measured_growth_bytes
    why = "not run" if line is None else line.skipped
    return [
        name,
        policy,
        f"{float(shape[_OLD_ESTIMATE]):,.0f}",
        f"{int(shape[_OTHER_ENGINE[policy]]):,}",
        f"{predicted_bytes / MIB:,.0f}",
        why if measured is None else f"{measured / MIB:,.0f}",
        "" if measured is None else f"{predicted_bytes / measured - 1:+.1%}",
    ]


def table(text: Path) -> str:
    """The markdown table, MiB, with fresh estimates beside the measurements of the file."""
    lines = _read()
    rows = [
        ["shape", "ckpt", "old estimate", "other engine, measured (MB)", "this estimate", "measured on CPU", "error"],
        ["---", "---", *["---:"] * 5],
    ]
    for name, shape in _shapes().items():
        for policy in _POLICIES:
            spec = _spec(shape, policy, text)
            growth = growth_bytes(estimate(spec), spec)
            assert growth is not None  # these settings all have a formula
            rows.append(_cells(name, shape, policy, lines.get((name, policy)), growth))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str]) -> None:
    """The bench; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dossier")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--only", default="", help="the shapes whose name holds this word")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dossier-") as name:
        folder = Path(name)
        text = text_file(folder)
        lines = _read()
        for shape, columns in [] if chosen.table else _shapes().items():
            for policy in _POLICIES if chosen.only in shape else ():
                line = _measure(shape, policy, _spec(columns, policy, text), folder)
                lines[shape, policy] = line
                done = line.skipped or f"{line.measured_growth_bytes} bytes, {line.seconds} s"
                print(f"{shape} ckpt={policy}: {done}", file=sys.stderr, flush=True)
                _write(lines)
        print(table(text))


if __name__ == "__main__":
    main(sys.argv[1:])
