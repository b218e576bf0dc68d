"""Verdicts around a memory limit, each then tried: the run is started in a cgroup that has this limit.

`python -m tests.bench.cpu_limit` takes shapes whose predicted peaks lie from 0.8 to 1.25 times the limit, accepts those
whose peak_device_bytes is at most the limit (no margin), runs all of them, the refused too, and writes a line for each
to tests/evidence/cpu_limit.csv. `--again` runs nothing and judges the runs of that file with the estimate as it is
here: which of them lived does not depend on what was predicted. The bench needs a cgroup of its own:
memory.limit_in_bytes (v1) or memory.max (v2) writable, as root has it.

What a limit counts. The prediction is of the resident set, which has two parts. Anonymous pages (tensors, heap) are
charged to the cgroup and cannot be taken back without swap, which is off: they are what kills. Pages of mapped files
(the libraries' code) are page cache: charged to whichever cgroup read them first, shared by all processes, dropped and
read again under pressure, never a reason to kill. So a limit of L bytes of resident set is a limit of L less the mapped
files' share on the cgroup, and that share is measured first, by a run without a limit (RssFile of /proc/PID/status);
it differs by a few MiB from shape to shape (column mapped_bytes). Kernel memory (page tables, stacks, sockets) is
charged on top and is in no prediction: 6 to 10 MiB by memory.kmem.max_usage_in_bytes. Both limit how near to the limit
a verdict can be tried: to about half a per cent. Files that the run writes are page cache too, and the cgroup waits for
them to reach the disk; a tmpfs would be charged as memory, so the run folder must not be on one.
"""

import argparse
import csv
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from orchestrator import oomguard
from orchestrator.memory.formula import estimate
from tests.bench import cpu_truth
from tests.bench.cpu_truth import MIB, Ended, specify, text_file
from train.spec import TrainSpec

EVIDENCE = cpu_truth.ROOT / "tests" / "evidence" / "cpu_limit.csv"
LIMIT_BYTES = 1228 * MIB
# Predicted over the limit: close together near one, where a verdict can be wrong.
_RATIOS = (0.80, 0.86, 0.91, 0.95, 0.97, 0.98, 0.99, 0.995, 1.005, 1.01, 1.02, 1.03, 1.05, 1.09, 1.16, 1.25)
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_SEQ_STEP = 4
_LONGEST = 2048


def _shape(family: str, layers: int, width: int, batch: int, *more: str) -> tuple[str, ...]:
    """A shape whose sequence length is open."""
    heads = width // 32
    sizes = (f"model.num_layers={layers}", f"model.d_model={width}", f"train.micro_batch={batch}")
    if family == "tiny":
        rest: tuple[str, ...] = (f"model.num_kv_heads={heads}", f"model.d_mlp={4 * width}")
    else:
        rest = (f"model.num_kv_heads={heads // 4}", f"model.d_mlp={width * 11 // 4}", "model.vocab_size=4096")
    return (f"model={family}", *sizes, f"model.num_heads={heads}", "model.head_dim=32", *rest, *more)


SHAPES = {
    "none": _shape("tiny", 8, 256, 4),
    "full": _shape("tiny", 24, 256, 12, "ckpt=full"),
    "selective": _shape("tiny", 12, 256, 4, "ckpt=selective", "ckpt.every=2"),
    "math": _shape("tiny", 6, 256, 2, "model.attention=math"),
    "swiglu-mixed": _shape("tinyllama_1b", 8, 256, 4, "train.precision=bf16_mixed"),
    "swiglu-ops": _shape("tinyllama_1b", 12, 256, 4, "ckpt=ops", "ckpt.save=every_second_matmul"),
    "accum-chunked": _shape("tiny", 8, 256, 4, "train.grad_accum=2", "train.loss=chunked", "model.vocab_size=8192"),
    "two-ranks": _shape("tiny", 8, 256, 4, "parallel.devices_per_node=2"),
}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One line of the evidence."""

    shape: str
    overrides: str
    ranks: int
    limit_bytes: int
    """Resident set a rank may have."""
    predicted_bytes: int
    """peak_device_bytes of a rank."""
    ratio: float
    """Predicted over limit."""
    accepted: bool
    """Predicted at most the limit, no margin."""
    verdict: str
    """With the documented margin: fits, tight or does_not_fit."""
    lived: bool
    returncodes: str
    cgroup_limit_bytes: int
    """All ranks together, less the mapped files' share."""
    cgroup_peak_bytes: int
    """max_usage_in_bytes or memory.peak; page cache included, so it touches the limit without harm."""
    measured_bytes: int | None
    """Peak resident set of rank 0; None where it was killed."""
    mapped_bytes: int
    """Highest RssFile of rank 0."""
    seconds: float


class _Cgroup:
    """A cgroup with a memory limit, under v1 or v2."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.v1 = (_V1 / "memory.limit_in_bytes").exists()
        self.folder = (_V1 if self.v1 else _V2) / name
        self.folder.mkdir()
        if self.v1:
            self._set("memory.limit_in_bytes", limit_bytes)
            if (self.folder / "memory.memsw.limit_in_bytes").exists():
                self._set("memory.memsw.limit_in_bytes", limit_bytes)
        else:
            self._set("memory.max", limit_bytes)
            self._set("memory.swap.max", 0)

    def _set(self, file: str, value: int) -> None:
        (self.folder / file).write_text(str(value), encoding="ascii")

    @property
    def joining(self) -> tuple[str, ...]:
        """A command that puts itself in, then executes the words after it."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def peak_bytes(self) -> int:
        """Most that was charged at once."""
        file = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.folder / file).read_text(encoding="ascii"))

    def remove(self) -> None:
        """Once its processes have gone, which the kernel may take a moment to see."""
        while (self.folder / "cgroup.procs").read_text(encoding="ascii").strip():
            time.sleep(0.05)
        self.folder.rmdir()


@contextmanager
def _cgroup(limit_bytes: int) -> Iterator[_Cgroup]:
    made = _Cgroup(f"cpu-limit-{os.getpid()}", limit_bytes)
    try:
        yield made
    finally:
        made.remove()


def require_cgroup() -> None:
    """Raises SystemExit where this process can make no cgroup with a memory limit."""
    try:
        with _cgroup(LIMIT_BYTES):
            pass
    except OSError as error:
        raise SystemExit(
            f"no cgroup with a memory limit can be made ({error.filename}: {error.strerror}). It takes the memory "
            f"controller of cgroup v1 ({_V1}) or v2 ({_V2}) and the right to write there: run it as root."
        ) from error


class _MappedFiles:
    """The highest RssFile of a process that is looked at again and again, bytes."""

    def __init__(self) -> None:
        self.highest_bytes = 0

    def look(self, pid: int) -> None:
        """Read it once."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        except OSError:  # it ended meanwhile
            return
        for line in lines:
            if line.startswith("RssFile:"):
                self.highest_bytes = max(self.highest_bytes, int(line.split()[1]) * 1024)


def _limited(spec: TrainSpec, run_dir: Path, limit_bytes: int) -> tuple[Ended, int, int]:
    """The run in a cgroup of this limit; what it left, the cgroup's peak, the highest RssFile."""
    mapped = _MappedFiles()
    with _cgroup(limit_bytes) as group:
        ended = cpu_truth.run(spec, run_dir, prefix=group.joining, watch=mapped.look)
        peak_bytes = group.peak_bytes()
    shutil.rmtree(run_dir)
    return ended, peak_bytes, mapped.highest_bytes


def _with_length(spec: TrainSpec, seq_len: int) -> TrainSpec:
    model = spec.model.model_copy(update={"context_length": seq_len})
    return spec.model_copy(
        update={"model": model, "train": spec.train.model_copy(update={"seq_len": seq_len})},
    )


def _predicted_bytes(spec: TrainSpec) -> int:
    found = estimate(spec).peak_device_bytes
    if found is None:
        raise SystemExit(f"no formula: {estimate(spec).unknown[0]}")
    return found


def _nearest(spec: TrainSpec, target_bytes: float) -> TrainSpec:
    """The spec with the sequence length whose predicted peak is the closest to the target; the peak grows with it."""
    low, high = 1, _LONGEST // _SEQ_STEP
    while low < high:
        middle = (low + high) // 2
        if _predicted_bytes(_with_length(spec, middle * _SEQ_STEP)) < target_bytes:
            low = middle + 1
        else:
            high = middle
    around = [_with_length(spec, n * _SEQ_STEP) for n in (low - 1, low) if n > 0]
    return min(around, key=lambda near: abs(_predicted_bytes(near) - target_bytes))


def _configs(text: Path, only: str) -> list[tuple[str, TrainSpec]]:
    """Shapes at the ratios: each takes every other one, so all ratios come up equally often."""
    found: list[tuple[str, TrainSpec]] = []
    for number, shape in enumerate(SHAPES):
        if only in shape:
            spec = specify(SHAPES[shape], text)
            found += [(shape, _nearest(spec, ratio * LIMIT_BYTES)) for ratio in _RATIOS[number % 2 :: 2]]
    return found


def _try(shape: str, spec: TrainSpec, folder: Path, mapped_bytes: int) -> Tried:
    seq_len, ranks = spec.train.seq_len, spec.parallel.world_size
    limit = ranks * (LIMIT_BYTES - mapped_bytes)
    ended, cgroup_peak, mapped = _limited(spec, folder / "run", limit)
    if any(code not in (0, -signal.SIGKILL) for code in ended.returncodes):
        raise SystemExit(f"{shape}: the run ended with {ended.returncodes}:\n{ended.last_lines}")
    return Tried(
        shape=shape,
        overrides=f"{' '.join(SHAPES[shape])} model.context_length={seq_len} train.seq_len={seq_len}",
        ranks=ranks,
        limit_bytes=LIMIT_BYTES,
        **_judged(spec, LIMIT_BYTES),
        lived=not any(ended.returncodes),
        returncodes=" ".join(map(str, ended.returncodes)),
        cgroup_limit_bytes=limit,
        cgroup_peak_bytes=cgroup_peak,
        measured_bytes=None if ended.report is None else ended.report.measured_peak_bytes,
        mapped_bytes=mapped,
        seconds=round(ended.seconds, 1),
    )


def _judged(spec: TrainSpec, limit_bytes: int) -> dict[str, Any]:
    """What the estimate says of a run: the fields of Tried that depend on it."""
    peak = _predicted_bytes(spec)
    return {
        "predicted_bytes": peak,
        "ratio": round(peak / limit_bytes, 4),
        "accepted": peak <= limit_bytes,
        "verdict": oomguard.judge(spec, estimate(spec), limit_bytes).verdict,
    }


def _judged_again(path: Path, text: Path) -> list[Tried]:
    """The runs of the file with the verdicts of the estimate as it is now."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [_parse(line) for line in csv.DictReader(file)]
    return [replace(line, **_judged(specify(line.overrides.split(), text), line.limit_bytes)) for line in lines]


def _parse(line: dict[str, str]) -> Tried:
    return Tried(
        shape=line["shape"],
        overrides=line["overrides"],
        ranks=int(line["ranks"]),
        limit_bytes=int(line["limit_bytes"]),
        predicted_bytes=int(line["predicted_bytes"]),
        ratio=float(line["ratio"]),
        accepted=line["accepted"] == "True",
        verdict=line["verdict"],
        lived=line["lived"] == "True",
        returncodes=line["returncodes"],
        cgroup_limit_bytes=int(line["cgroup_limit_bytes"]),
        cgroup_peak_bytes=int(line["cgroup_peak_bytes"]),
        measured_bytes=int(line["measured_bytes"]) if line["measured_bytes"] else None,
        mapped_bytes=int(line["mapped_bytes"]),
        seconds=float(line["seconds"]),
    )


def _mapped_without_limit(text: Path, folder: Path) -> int:
    """RssFile of a run that nothing presses, bytes."""
    run_dir = folder / "probe"
    mapped = _MappedFiles()
    ended = cpu_truth.run(_with_length(specify(SHAPES["none"], text), 128), run_dir, watch=mapped.look)
    shutil.rmtree(run_dir)
    if any(ended.returncodes):
        raise SystemExit(f"the run without a limit ended with {ended.returncodes}:\n{ended.last_lines}")
    return mapped.highest_bytes


def _write(path: Path, lines: Sequence[Tried]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Tried)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def _print_line(tried: Tried) -> None:
    words = "accepted" if tried.accepted else "refused"
    wrong = "" if tried.accepted == tried.lived else "  WRONG"
    measured = "" if tried.measured_bytes is None else f"{tried.measured_bytes / MIB:7.0f}"
    print(
        f"{tried.shape:<14} {tried.overrides.rpartition('=')[2]:>4} tokens  {tried.ratio:.3f} of the limit"
        f"  predicted {tried.predicted_bytes / MIB:6.0f}  measured {measured:>7}  {words} ({tried.verdict})"
        f"  {'lived' if tried.lived else 'killed'}{wrong}",
        flush=True,
    )


def _print_summary(lines: Sequence[Tried]) -> None:
    accepted = [line for line in lines if line.accepted]
    refused = [line for line in lines if not line.accepted]
    sure = [line for line in lines if line.verdict == "fits"]
    died, lived = [line for line in accepted if not line.lived], [line for line in refused if line.lived]
    print(f"{len(lines)} configs, {len(accepted)} accepted, {len(refused)} refused, without a margin")
    print(f"accepted and killed: {len(died)}   refused and would have lived: {len(lived)} of {len(refused)}")
    print(f"with the margin: {sum(not line.lived for line in sure)} of {len(sure)} that fit were killed")
    dead = [line.ratio for line in lines if not line.lived]
    alive = [line.ratio for line in lines if line.lived]
    if dead and alive:
        print(f"lowest predicted share of the limit that was killed {min(dead)}, highest that lived {max(alive)}")


def main(argv: Sequence[str]) -> None:
    """The bench; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cpu_limit")
    parser.add_argument("--only", default="", help="the shapes whose name holds this word")
    parser.add_argument("--list", action="store_true", help="print the configs, run nothing")
    parser.add_argument("--again", action="store_true", help="run nothing, judge the runs of the file again")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    chosen = parser.parse_args(argv)
    if not (chosen.list or chosen.again):
        require_cgroup()
    lines: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="cpu-limit-") as name:
        folder = Path(name)
        text = text_file(folder)
        if chosen.again:
            lines = _judged_again(chosen.out, text)
            for line in lines:
                _print_line(line)
            _write(chosen.out, lines)
            return _print_summary(lines)
        configs = _configs(text, chosen.only)
        if chosen.list:
            for shape, spec in configs:
                print(f"{shape:<14} {spec.train.seq_len:>5}  {_predicted_bytes(spec) / LIMIT_BYTES:.3f}")
            return None
        mapped_bytes = _mapped_without_limit(text, folder)
        print(f"mapped files of a run without a limit: {mapped_bytes / MIB:.0f} MiB", flush=True)
        for shape, spec in configs:
            lines.append(_try(shape, spec, folder, mapped_bytes))
            _print_line(lines[-1])
            _write(chosen.out, lines)
    return _print_summary(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
