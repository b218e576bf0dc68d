"""Other people's runs on real GPUs, beside what the estimate says of the same configuration.

`python -m tests.bench.public` maps every row of public_memory.csv, public_fits.csv and public_heldout.csv in
tests/evidence to a TrainSpec, or says why it cannot, prints predicted against measured, and writes public_mapping.csv.

Nothing is fitted. Where the code of a row keeps other tensors than this trainer, the difference is computed from shapes
and listed with its size: it explains a residual and is never part of the prediction. `with differences` adds all of a
row's differences to the peak, although they need not fall on its moment: it is for reading, not for scoring.
"""

import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from orchestrator.memory.estimate import MemoryEstimate
from orchestrator.memory.formula import estimate
from tests.specs import train_spec
from train import shapes
from train.spec import TrainSpec

_EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
HELD_OUT = "public_heldout.csv"
"""Rows that were looked up when the estimate was finished: no rule of it was made with them in view."""
FILES = ("public_memory.csv", "public_fits.csv", HELD_OUT)
MAPPING = _EVIDENCE / "public_mapping.csv"
GIB = 1024**3
_FP32, _BF16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run, as its file has it."""

    file: str
    line: int
    """Line of the file; the header is line 1."""
    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.fields[name]

    @property
    def measured_bytes(self) -> int | None:
        """The published peak; None where only that it ran was published."""
        gib = self["measured_peak_gib"]
        return int(float(gib) * GIB) if gib else None

    @property
    def is_first_step(self) -> bool:
        """Whether the figure is of the first step, before AdamW has states."""
        return self["notes"].startswith("step1 only")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What the code of a row holds beyond this trainer (negative: what it does not), at most, at the peak."""

    what: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """The same run as a config of ours."""

    overrides: tuple[str, ...]
    spec: TrainSpec
    differences: tuple[Difference, ...]


@dataclass(frozen=True, kw_only=True)
class NotMapped:
    """Why a row has no config of ours."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row, its mapping, and what the estimate says."""

    row: Row
    mapped: Mapped | NotMapped
    predicted_bytes: int | None
    """Of the quantity that was measured; None where nothing was, or where the estimate does not know it."""
    device_bytes: int | None
    """peak_device_bytes of the estimate."""
    unknown: str
    """Why the estimate has no number, empty where it has one."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        measured = self.row.measured_bytes
        return None if measured is None or self.predicted_bytes is None else self.predicted_bytes / measured - 1

    @property
    def difference_bytes(self) -> int:
        """All known differences together."""
        differences = self.mapped.differences if isinstance(self.mapped, Mapped) else ()
        return sum(each.num_bytes for each in differences)

    @property
    def refused(self) -> bool | None:
        """Whether the run would be refused at its card's usable bytes without a margin; None: cannot tell.

        What the row's own code holds beyond this trainer counts, what it does not hold is not taken off.
        """
        if isinstance(self.mapped, NotMapped) or self.device_bytes is None:
            return None
        beyond = sum(max(0, each.num_bytes) for each in self.mapped.differences)
        usable = self.mapped.spec.device.usable_bytes
        assert usable is not None, "every card of a mapped row has its usable bytes"
        return self.device_bytes + beyond > usable


def rows() -> list[Row]:
    """All rows of all files."""
    found = []
    for file in FILES:
        with (_EVIDENCE / file).open(encoding="utf-8", newline="") as lines:
            found += [Row(file=file, line=i, fields=row) for i, row in enumerate(csv.DictReader(lines), start=2)]
    return found


def mapping(row: Row) -> Mapped | NotMapped:
    """The config of a row, or the one reason why it has none."""
    reason = _no_config(row)
    if reason:
        return NotMapped(reason=reason)
    source = row["source"]
    if "torchtitan" in source:
        return _torchtitan(row)
    if "torchtune" in source:
        return _torchtune(row)
    if "litgpt" in source:
        return _litgpt(row)
    if "llm-foundry" in source:
        return _llm_foundry(row)
    raise ValueError(f"{row.file}, line {row.line}: no mapping is written for {source}")


def _no_config(row: Row) -> str | None:
    if row["compile"] == "y":
        return "torch.compile: what the compiler keeps for backward is not known beforehand (train.compile=true)"
    if "variable length" in row["notes"]:
        return "sequences of varying length, and the peak is that of an evaluation of batch 50"
    if "NOT packed" in row["notes"]:
        return "sequences of varying length, which is not published"
    return None


def outcome(row: Row) -> Outcome:
    """The row beside the estimate of its config."""
    mapped = mapping(row)
    if isinstance(mapped, NotMapped):
        return Outcome(row=row, mapped=mapped, predicted_bytes=None, device_bytes=None, unknown="")
    found = estimate(mapped.spec)
    unknown = "; ".join(str(problem) for problem in found.unknown)
    predicted = None if unknown or row.measured_bytes is None else _predicted_bytes(row, found)
    if not unknown and row.measured_bytes is not None and predicted is None:
        unknown = f"the estimate has no figure for {row['metric']}{' of the first step' if row.is_first_step else ''}"
    return Outcome(
        row=row, mapped=mapped, predicted_bytes=predicted, device_bytes=found.peak_device_bytes, unknown=unknown
    )


def _predicted_bytes(row: Row, found: MemoryEstimate) -> int | None:
    reserved = row["metric"] == "max_reserved"
    name = f"peak_{'reserved' if reserved else 'allocated'}_bytes"
    value = found.model_dump().get(f"first_step_{name}" if row.is_first_step else name)
    return None if value is None else int(value)


# The configs.


def _mapped(overrides: Iterable[str], differences: Iterable[tuple[str, int]] = ()) -> Mapped:
    words = tuple(overrides)
    listed = tuple(Difference(what=what, num_bytes=size) for what, size in differences if size)
    return Mapped(overrides=words, spec=spec_of(words), differences=listed)


def spec_of(overrides: tuple[str, ...]) -> TrainSpec:
    """As the command line composes it; groups once, keys on top of them, for speed."""
    groups = tuple(word for word in overrides if "." not in word.partition("=")[0])
    data = json.loads(_base(groups).model_dump_json())
    for word in overrides:
        key, _, value = word.partition("=")
        if "." in key:
            section, _, name = key.partition(".")
            if name not in data[section]:
                raise ValueError(f"{word}: {section} has no key {name}")
            data[section][name] = yaml.safe_load(value)
    return TrainSpec.model_validate_json(json.dumps(data))


@cache
def _base(groups: tuple[str, ...]) -> TrainSpec:
    return train_spec(*groups)


def _shape(row: Row) -> list[str]:
    """Overrides of the model's sizes."""
    heads = int(row["num_heads"])
    sizes = {name: row[name] for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_mlp", "vocab_size")}
    sizes |= {"head_dim": str(int(row["d_model"]) // heads), "context_length": row["seq_len"]}
    return [f"model.{name}={value}" for name, value in sizes.items()]


def _loop(row: Row, grad_accum: int | None = None) -> list[str]:
    devices = int(row["num_devices"])
    a_node = min(8, devices)
    return [
        f"train.micro_batch={row['micro_batch']}",
        f"train.grad_accum={grad_accum or row['grad_accum']}",
        f"train.seq_len={row['seq_len']}",
        f"parallel.nodes={devices // a_node}",
        f"parallel.devices_per_node={a_node}",
    ]


def _logits(spec: TrainSpec) -> int:
    """Numbers in the logits of a micro-batch."""
    return spec.train.micro_batch * spec.train.seq_len * spec.model.vocab_size


def _hidden(spec: TrainSpec) -> int:
    """Numbers in the residual stream of a micro-batch."""
    return spec.train.micro_batch * spec.train.seq_len * spec.model.d_model


def _beyond_chunked(spec: TrainSpec, loss_bytes: int) -> int:
    """What a loss that holds `loss_bytes` of the logits at its worst adds to the peak of train.loss=chunked.

    The peak with train.loss=full, where it is at the cross-entropy, is that of all else and of three fp32 tensors of
    the logits; with `loss_bytes` in their place it is theirs, if it is above the one elsewhere in the step.
    """
    full = estimate(spec.model_copy(update={"train": spec.train.model_copy(update={"loss": "full"})}))
    chunked = estimate(spec)
    if full.peak_allocated_bytes is None or chunked.peak_allocated_bytes is None:
        return 0
    if full.peak_instant != "cross-entropy":
        return 0
    theirs = full.peak_allocated_bytes - 3 * _FP32 * _logits(spec) + loss_bytes
    return max(0, theirs - chunked.peak_allocated_bytes)


_TITAN_CARDS = {"H100-96GB(HBM2e)": "h100_96gb", "A100-80GB": "a100_80gb"}


def _torchtitan(row: Row) -> Mapped:
    """FSDP2 with blocks and root as groups, bf16 compute, fp32 reduction, clipping, AdamW (foreach unless `fused`).

    Read at the commits that the rows name: parallelisms/parallelize_llama.py, train.py, models/llama/model.py,
    models/norms.py. Its reshard_after_forward=always is this project's default: blocks yes, and FSDP2 of that time kept
    the root gathered whatever it was told (torch 2.8 is the first to follow it there).
    """
    fused = "gpt2" in row["model"]  # train_configs/gpt2.toml
    never = "never" in row["sharding"]
    policy = {"none": ["ckpt=none"], "full": ["ckpt=full"]}.get(
        row["ckpt"], ["ckpt=ops", "ckpt.save=every_second_matmul"]
    )
    chunked = row["loss"] == "chunked CE"
    words = [
        "model=llama3_8b",
        *policy,
        f"device={_TITAN_CARDS[row['device']]}",
        "parallel=node_8",
        *_shape(row),
        *_loop(row),
        "train.precision=bf16_mixed",
        f"train.loss={'chunked' if chunked else 'full'}",
        f"parallel.reshard_after_forward={'never' if never else 'default'}",
        f"optim.impl={'fused' if fused else 'foreach'}",
    ]
    spec = spec_of(tuple(words))
    return _mapped(words, [*_titan_sharding(row, spec), *_titan_loss(row, spec), *_titan_norms(row, spec)])


def _titan_sharding(row: Row, spec: TrainSpec) -> Iterable[tuple[str, int]]:
    if not any(word in row["sharding"] for word in ("never", "always")):
        block = shapes.block_num_parameters(spec.model) * _BF16
        yield "the last block stays gathered after its forward", block
    held_idle = row["metric"] not in ("max_active", "max_allocated")
    if held_idle and any(word in row["source"] for word in ("PR#355", "PR#165", "performance.md")):
        # pytorch#129721 of 27 June 2024 moved it to the stream of computation and printed 2.53 GiB less for this model.
        root = sum(shape.numel for shape in shapes.root_parameters(spec.model)) * _FP32
        yield "the root's reduce-scatter input is of a stream of its own, which nothing else can use", root


def _titan_loss(row: Row, spec: TrainSpec) -> Iterable[tuple[str, int]]:
    logits = _logits(spec)
    if row["loss"] == "chunked CE":
        # components/loss.py, chunked_cross_entropy_loss; all chunks' graphs live until backward.
        what = "chunked over logits that exist: bf16 logits, the fp32 log-softmax of every chunk and one fp32 chunk"
        yield what, _beyond_chunked(spec, logits * (_BF16 + _FP32) + logits * _FP32 // 8)
    if ".float() inside" in row["loss"] or "performance.md" in row["source"]:
        # train.py of March to June 2024 has no `del pred`.
        yield "`pred`, in fp32, is held by the loop through backward", logits * _FP32


def _titan_norms(row: Row, spec: TrainSpec) -> Iterable[tuple[str, int]]:
    # models/norms.py: x.float() is kept for two multiplications, its bf16 result for the weight; ours keeps bf16 x.
    a_norm = _hidden(spec) * (_FP32 + _BF16 - _BF16)
    if row["ckpt"] == "none":
        yield (
            "rms norm in steps keeps an fp32 input and a bf16 result for our bf16 input",
            a_norm * (2 * spec.model.num_layers + 1),
        )
        return
    yield "the last norm in steps keeps an fp32 input and a bf16 result for our bf16 input", a_norm


def _torchtune(row: Row) -> Mapped:
    """One device without FSDP, parameters and AdamW in bf16; the table and the recipe are of November 2024 (1814feb17).

    A peak of 60 GiB needs the card of 80 GB.
    """
    words = [
        "model=llama3_2_3b",
        "ckpt=none",
        "device=a100_80gb",
        "parallel=single",
        *_shape(row),
        *_loop(row),
        "train.precision=bf16",
        "optim.impl=foreach",
        "optim.clip_norm=null",
    ]
    spec = spec_of(tuple(words))
    model, tokens = spec.model, spec.train.micro_batch * spec.train.seq_len
    return _mapped(
        words,
        [
            _no_fsdp(spec),
            _stepwise_norms(spec),
            _expanded_heads(spec),
            (
                "rotary table gathered by position and kept in every block, for queries and for keys",
                2 * model.num_layers * tokens * model.head_dim * _FP32,
            ),
        ],
    )


def _litgpt(row: Row) -> Mapped:
    """One device without FSDP, parameters and AdamW in bf16; extensions/thunder/pretrain.py of May 2024 (101e31d2).

    Its default global batch of 512 on one device is 128 micro-batches of 4; the published command changes neither.
    Lightning's bf16-true hands the logits on in fp32 (fabric/plugins/precision/half.py), as this trainer does.
    """
    words = [
        "model=tinyllama_1b",
        "ckpt=none",
        "device=a100_40gb",
        "parallel=single",
        *_shape(row),
        *_loop(row, grad_accum=128),
        "train.precision=bf16",
        "optim.impl=fused",
        "optim.clip_norm=null",
    ]
    spec = spec_of(tuple(words))
    return _mapped(words, [_no_fsdp(spec), _stepwise_norms(spec), _expanded_heads(spec)])


def _no_fsdp(spec: TrainSpec) -> tuple[str, int]:
    root = sum(shape.numel for shape in shapes.root_parameters(spec.model))
    return "no FSDP: no second copy of the root's parameters", -root * _BF16


def _stepwise_norms(spec: TrainSpec) -> tuple[str, int]:
    norms = 2 * spec.model.num_layers + 1
    what = "rms norm in steps keeps an fp32 input and a bf16 result for our bf16 input"
    return what, norms * _hidden(spec) * (_FP32 + _BF16 - _BF16)


def _expanded_heads(spec: TrainSpec) -> tuple[str, int]:
    model, tokens = spec.model, spec.train.micro_batch * spec.train.seq_len
    more = 2 * (model.num_heads - model.num_kv_heads) * model.head_dim
    return "keys and values kept with as many heads as the queries", model.num_layers * tokens * more * _BF16


def _llm_foundry(row: Row) -> Mapped:
    """MPT (then MosaicGPT) of April 2023, torch 1.13: 9fa3ceb9a brought the table, the trainer is examples/llm there.

    Learned positions as long as the sequence, tied head, gelu, layernorm in bf16 and biases everywhere: the published
    parameter counts are met to the number (tests/test_public.py). Mixed precision PURE gathers bf16 and reduces in
    bf16, fp32 shards and states. The loss is the fused kernel of flash-attn, which this trainer does not have:
    train.loss=chunked with the difference added is the nearest.
    """
    policy = "none" if row["ckpt"] == "none" else "full"
    words = [
        "model=gpt2",
        f"ckpt={policy}",
        f"device={row['device']}",
        "parallel=node_8",
        *_shape(row),
        *_loop(row),
        "train.precision=bf16_mixed",
        "train.loss=chunked",
        "optim.impl=forloop",
    ]
    spec = spec_of(tuple(words))
    root = sum(shape.numel for shape in shapes.root_parameters(spec.model))
    largest = max(root, shapes.block_num_parameters(spec.model))
    return _mapped(
        words,
        [
            (
                "fused cross-entropy: bf16 logits and their bf16 gradient",
                _beyond_chunked(spec, 2 * _BF16 * _logits(spec)),
            ),
            (
                "gradients reduced in bf16: the reduce-scatter's input is half as large, and is the gradient itself",
                -largest * (_FP32 - _BF16),
            ),
        ],
    )


# The record.


def write_mapping(outcomes: Iterable[Outcome]) -> None:
    """tests/evidence/public_mapping.csv: one line a row."""
    with MAPPING.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(_record_fields()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_record(each) for each in outcomes)


def _record_fields() -> tuple[str, ...]:
    return (
        *("file", "line", "model", "overrides", "not_mapped", "unknown", "metric", "measured_bytes"),
        *("predicted_bytes", "error", "peak_device_bytes", "refused", "difference_bytes", "differences"),
    )


def _record(each: Outcome) -> dict[str, Any]:
    mapped = each.mapped
    values = (
        *(each.row.file, each.row.line, each.row["model"]),
        " ".join(mapped.overrides) if isinstance(mapped, Mapped) else "",
        mapped.reason if isinstance(mapped, NotMapped) else "",
        *(each.unknown, each.row["metric"], each.row.measured_bytes, each.predicted_bytes),
        None if each.error is None else f"{each.error:+.4f}",
        *(each.device_bytes, each.refused, each.difference_bytes),
        "; ".join(f"{d.num_bytes:+d} {d.what}" for d in mapped.differences) if isinstance(mapped, Mapped) else "",
    )
    return dict(zip(_record_fields(), values, strict=True))


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.2f}"


def _name(row: Row) -> str:
    words = (row["model"].partition(" ")[0], f"b{row['micro_batch']}", f"t{row['seq_len']}", f"x{row['num_devices']}")
    return " ".join(words)


def print_measured(outcomes: Iterable[Outcome]) -> None:
    """Rows with a published figure: predicted, measured, error, and what is known to differ."""
    for each in outcomes:
        row, mapped = each.row, each.mapped
        if row.measured_bytes is None:
            continue
        head = f"{row.file}:{row.line:<3} {_name(row):<34} {row['metric']:<13}"
        if isinstance(mapped, NotMapped):
            print(f"{head} not mapped: {mapped.reason}")
            continue
        if each.predicted_bytes is None or each.error is None:
            print(f"{head} measured {_gib(row.measured_bytes)}  unknown: {each.unknown}")
        else:
            both = (each.predicted_bytes + each.difference_bytes) / row.measured_bytes - 1
            print(
                f"{head} measured {_gib(row.measured_bytes)}  predicted {_gib(each.predicted_bytes)} GiB "
                f"({each.error:+.1%}; with differences {both:+.1%})"
            )
        for difference in mapped.differences:
            print(f"{'':20} {difference.num_bytes / GIB:+7.2f} GiB  {difference.what}")


def print_ran(outcomes: Iterable[Outcome]) -> None:
    """Rows of runs that ended well: which would be refused, and which cannot be told."""
    ran = [each for each in outcomes if each.row["outcome"] == "fit"]
    for each in ran:
        if each.refused:
            assert isinstance(each.mapped, Mapped)
            usable = each.mapped.spec.device.usable_bytes
            print(f"refused  {each.row.file}:{each.row.line} {_name(each.row)}: {_gib(each.device_bytes)} GiB", end="")
            print(f" and {_gib(each.difference_bytes)} of differences, {_gib(usable)} usable")
    told = [each for each in ran if each.refused is not None]
    refused = sum(1 for each in told if each.refused)
    print(f"ran: {len(ran)} rows; judged {len(told)}, of which refused {refused}; not judged {len(ran) - len(told)}:")
    reasons = [
        each.mapped.reason if isinstance(each.mapped, NotMapped) else f"unknown: {each.unknown}"
        for each in ran
        if each.refused is None
    ]
    for reason in sorted(set(reasons)):
        print(f"  {reasons.count(reason):3d}  {reason}")


def print_errors(outcomes: Iterable[Outcome]) -> None:
    """Median, worst and coverage of the rows with a published figure."""
    measured = [each for each in outcomes if each.row.measured_bytes is not None]
    for what, held_out in (("known when the estimate was made", False), ("held out", True), ("together", None)):
        some = [each for each in measured if held_out in (None, each.row.file == HELD_OUT)]
        known = [each for each in some if each.error is not None and each.predicted_bytes is not None]
        errors = [abs(each.error or 0.0) for each in known]
        with_differences = [
            abs(((each.predicted_bytes or 0) + each.difference_bytes) / (each.row.measured_bytes or 1) - 1)
            for each in known
        ]
        print(
            f"{what}: {len(some)} rows measured, {len(known)} predicted; |error| {_spread(errors)}; "
            f"with differences {_spread(with_differences)}"
        )


def _spread(errors: list[float]) -> str:
    return f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}"


def main() -> None:
    """Print all of it and write the record."""
    outcomes = [outcome(row) for row in rows()]
    print_measured(outcomes)
    print()
    print_ran(outcomes)
    print()
    print_errors(outcomes)
    write_mapping(outcomes)


if __name__ == "__main__":
    main()
