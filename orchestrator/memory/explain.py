"""`check --explain`: the ledger of saved tensors, what each policy keeps of it, and memory over a step, as text.

Takes a TrainSpec whose device is resolved, gives lines for a person. It must not import torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.memory.block import block_ops, setting
from orchestrator.memory.formula import estimate
from orchestrator.memory.graph import recomputed
from orchestrator.memory.saved import Entry, kept_entries, ledger, stored_entries
from orchestrator.memory.sizes import cached_entries
from orchestrator.memory.step import Moment, moments
from orchestrator.units import flops, gib
from train.shapes import saved_ops
from train.spec import CkptSpec, TrainSpec

_BAR = 40
_PARTS = (
    ("parameters", "p"),
    ("optimizer_states", "o"),
    ("gradients", "g"),
    ("gathered_parameters", "f"),
    ("all_gather_buffers", "f"),
    ("gradient_buffers", "b"),
    ("activations", "#"),
    ("loss", "L"),
    ("scratch", "s"),
)
_LEGEND = (
    "p parameters  o optimizer states  g gradients  f gathered parameters and buffers  b gradient buffers",
    "# activations  L loss  s intermediates of the optimizer",
)
_NOTHING: dict[str, Any] = dict.fromkeys(("every", "layers", "first", "last", "save"))


def as_text(spec: TrainSpec) -> str:
    """The explanation of one config, or why there is none."""
    unknown = estimate(spec).unknown
    if unknown:
        return "no ledger: " + "; ".join(str(problem) for problem in unknown)
    parts = (_block(spec), _whole(spec), _policies(spec), _over_the_step(spec))
    return "\n\n".join("\n".join(part) for part in parts)


def _block(spec: TrainSpec) -> list[str]:
    here = setting(spec)
    ops = block_ops(here)
    kept = kept_entries(here, ops)
    columns = {"full": frozenset[str](), "every 2nd matmul": saved_ops(spec.model, "every_second_matmul")}
    if spec.ckpt.policy == "ops" and cached_entries(spec) not in columns.values():
        columns["this run"] = cached_entries(spec)
    stored = {name: {e.name for e in stored_entries(here, ops, cached)} for name, cached in columns.items()}
    rows = [["tensor", "made by", "shape", "dtype", "bytes", "FLOPs again", "kept for", "none", *columns]]
    for entry in kept:
        marks = ["kept" if entry.name in stored[name] else "again" for name in columns]
        rows.append([*_cells(entry), ", ".join(entry.kept_for), "kept", *marks])
    # What a policy can keep although backward has no use for it: it spares making it again.
    others = {e.name: e for e in stored_entries(here, ops, frozenset(op.entry for op in ops if op.entry))}
    known = {entry.name for entry in kept} | {"input", "rng_state"}
    for name in (name for name in others if name not in known):
        spared = name in recomputed(ops, frozenset())
        marks = [("kept" if spared else "kept in vain") if name in stored[column] else "" for column in columns]
        rows.append([*_cells(others[name]), "what follows" if spared else "nothing", "", *marks])
    total = sum(entry.size_bytes for entry in kept)
    loop = spec.train
    return [
        f"what one of {spec.model.num_layers} blocks keeps for backward where nothing is recomputed: {gib(total)} "
        f"(micro_batch {loop.micro_batch}, seq_len {loop.seq_len}, {loop.precision}, {spec.model.attention} attention)",
        *_table(rows, right=(4, 5)),
    ]


def _cells(entry: Entry) -> list[str]:
    shape = "x".join(map(str, entry.dims))
    return [entry.name, entry.op, shape, entry.dtype, gib(entry.size_bytes), flops(entry.recompute_flops)]


def _whole(spec: TrainSpec) -> list[str]:
    sections = ledger(spec)
    rows = [["part", "copies", "each", "together"]]
    rows += [[s.name, str(s.copies), gib(s.size_bytes), gib(s.copies * s.size_bytes)] for s in sections]
    total = sum(section.copies * section.size_bytes for section in sections)
    rows.append(["all", "", "", gib(total)])
    return [f"what the whole model keeps under ckpt={spec.ckpt.policy}", *_table(rows, right=(1, 2, 3))]


def _policies(spec: TrainSpec) -> list[str]:
    """Each policy on this config: what stays, the peak, and what it costs."""
    policies = {
        "ckpt=none": CkptSpec(policy="none", **_NOTHING),
        "ckpt=ops ckpt.save=every_second_matmul": CkptSpec(
            policy="ops", **(_NOTHING | {"every": 1, "save": "every_second_matmul"})
        ),
        "ckpt=ops ckpt.save=attention": CkptSpec(policy="ops", **(_NOTHING | {"every": 1, "save": "attention"})),
        "ckpt=selective (every 2nd block)": CkptSpec(policy="selective", **(_NOTHING | {"every": 2})),
        "ckpt=full": CkptSpec(policy="full", **_NOTHING),
    }
    if spec.ckpt not in policies.values():
        policies["this run"] = spec.ckpt
    rows = [["policy", "kept activations", "peak of the device", "at", "FLOPs added"]]
    for name, ckpt in policies.items():
        changed = spec.model_copy(update={"ckpt": ckpt})
        found = estimate(changed)
        assert found.peak_device_bytes is not None  # a policy has no bearing on what has a formula
        held = sum(s.copies * s.size_bytes for s in ledger(changed) if "block" in s.name)
        at = f"{(found.peak_phase or '').replace('_', ' ')}, {found.peak_instant}"
        mark = "  <- this run" if ckpt == spec.ckpt and name != "this run" else ""
        cost = f"+{found.recompute_flops_fraction:.1%}{mark}"
        rows.append([name, gib(held), gib(found.peak_device_bytes), at, cost])
    return ["what each policy keeps and costs on this config", *_table(rows, right=(1, 2))]


def _over_the_step(spec: TrainSpec) -> list[str]:
    """A bar for each moment, blocks thinned out to the first, the middle and the last."""
    last = spec.model.num_layers - 1
    every = [m for m in moments(spec) if m.phase not in ("init", "resume")]
    shown = set(map(str, (0, (last + 1) // 2, last)))
    highest = max(every, key=lambda moment: moment.total_bytes)
    chosen = [m for m in every if m is highest or _layer(m) is None or _layer(m) in shown]
    lines = ["memory over a step, tensors of rank 0", *_LEGEND]
    for moment in chosen:
        peak = "  <- peak" if moment is highest else ""
        label = f"{moment.phase.replace('_', ' ')}, {moment.name}"
        lines.append(f"{label:<46} {gib(moment.total_bytes):>10} {_bar(moment, highest.total_bytes)}{peak}")
    return lines


def _layer(moment: Moment) -> str | None:
    words = moment.name.replace(",", "").split()
    return words[words.index("block") + 1] if "block" in words else None


def _bar(moment: Moment, highest: int) -> str:
    terms, bar, seen = moment.terms(), "", 0
    for name, letter in _PARTS:
        seen += terms[name]
        bar += letter * (round(_BAR * seen / highest) - len(bar))
    return bar


def _table(rows: Iterable[Sequence[str]], right: tuple[int, ...]) -> list[str]:
    """Columns as wide as their longest text; those of `right` with numbers."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
