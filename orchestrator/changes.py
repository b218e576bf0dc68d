"""Ways to make a run smaller that keep the tokens of its optimizer step: as overrides, and as a spec.

Takes a Change, the run as it is at first, gives Changes; it does not judge them. It must not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from train.spec import CkptSpec, SavedName, TrainSpec, as_typed

_BF16_CAPABILITY = 8.0
_OPS_SAVE: SavedName = "every_second_matmul"
Policy = Literal["none", "full", "selective", "ops"]
# Settings of the options in conf/ckpt/, which an override need not repeat; tests/test_planner.py composes each change.
_OPTION_EVERY: dict[Policy, int | None] = {"none": None, "full": None, "selective": 2, "ops": 1}
_OPTION_SAVE: dict[Policy, SavedName | None] = {"none": None, "full": None, "selective": None, "ops": _OPS_SAVE}
Save = SavedName | tuple[SavedName, ...]
PRESETS: tuple[SavedName, ...] = ("every_second_matmul", "attention")
"""Of ckpt.save, the one that recomputes less first."""
Cost = Literal["micro_batch", "devices", "precision"]
"""What a change costs that neither bytes nor FLOPs show: smaller kernels, more devices, other numerics."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The run with other settings."""

    overrides: tuple[str, ...]
    """To be added to the command line."""
    train: TrainSpec
    costs: frozenset[Cost] = frozenset()


def unchanged(spec: TrainSpec) -> Change:
    """The run as it is."""
    return Change(overrides=(), train=spec)


def saves(spec: TrainSpec) -> tuple[Save, ...]:
    """What ckpt=ops may keep, from the most to the least: products that backward or a recomputation reads."""
    gate: tuple[SavedName, ...] = ("mlp_gate",) if spec.model.mlp == "swiglu" else ()
    most: tuple[SavedName, ...] = ("attention", "qkv", "o", *gate, "mlp_up")
    lists: list[Save] = [most, ("attention", "qkv", "o", "mlp_up")] if gate else [most]
    return (*lists, ("attention", "qkv", "o"), ("attention", "qkv"), *PRESETS)


def with_ckpt(
    change: Change, policy: Policy, typed: tuple[str, ...], *, save: Save | None = None, first: int | None = None
) -> Change:
    """Another option of ckpt with its own settings, but for `save` and `first`.

    `typed` are the overrides of the command line: what they, or an experiment, say of ckpt would stand in the way of
    the option, so that it is set to what the option has.
    """
    before = change.train.ckpt
    ckpt = CkptSpec(policy=policy, every=_OPTION_EVERY[policy], layers=None, first=first, last=None, save=save)
    words = [f"ckpt={policy}"]
    for name, option in _option_of(policy).items():
        value = getattr(ckpt, name)
        stands = any(word.lstrip("+").startswith(f"ckpt.{name}=") for word in typed)
        stands = stands or getattr(before, name) != _option_of(before.policy)[name]
        if stands or value != option:
            words.append(f"ckpt.{name}={as_typed(value)}")
    train = change.train.model_copy(update={"ckpt": ckpt})
    return Change(overrides=(*words, *change.overrides), train=train, costs=change.costs)


def _option_of(policy: Policy) -> dict[str, object]:
    """The settings of conf/ckpt/<policy>.yaml."""
    return {
        "save": _OPTION_SAVE[policy],
        "every": _OPTION_EVERY[policy],
        "layers": None,
        "first": None,
        "last": None,
    }


def chunked_loss(change: Change) -> Change:
    """Never all logits at once; the same FLOPs."""
    loop = change.train.train.model_copy(update={"loss": "chunked"})
    train = change.train.model_copy(update={"train": loop})
    return Change(overrides=("train.loss=chunked", *change.overrides), train=train, costs=change.costs)


def bf16_mixed(change: Change) -> Change | None:
    """Computation in bf16; None where it is so already or the device has no bf16."""
    device, loop = change.train.device, change.train.train
    able = device.kind == "cpu" or (device.compute_capability or 0.0) >= _BF16_CAPABILITY
    if loop.precision != "fp32" or not able:
        return None
    train = change.train.model_copy(update={"train": loop.model_copy(update={"precision": "bf16_mixed"})})
    words = (*change.overrides, "train.precision=bf16_mixed")
    return Change(overrides=words, train=train, costs=change.costs | {"precision"})


def smaller_micro_batches(change: Change) -> list[Change]:
    """Fewer sequences at a time and more accumulation, largest micro-batch first."""
    loop = change.train.train
    return [
        _with_batch(change, micro, loop.grad_accum * (loop.micro_batch // micro))
        for micro in range(loop.micro_batch - 1, 0, -1)
        if loop.micro_batch % micro == 0
    ]


def more_devices(change: Change, at_most: int) -> Iterator[Change]:
    """Parameters and optimizer states over more devices of one machine, fewest first."""
    parallel, loop = change.train.parallel, change.train.train
    if change.train.device.kind != "cuda" or parallel.shard == "none":
        return
    sequences = loop.micro_batch * loop.grad_accum * parallel.world_size
    for devices in range(parallel.devices_per_node + 1, at_most + 1):
        per_rank, rest = divmod(sequences, devices * parallel.nodes)
        if rest or per_rank == 0:
            continue
        micro = max(m for m in range(1, loop.micro_batch + 1) if per_rank % m == 0)
        more = parallel.model_copy(update={"devices_per_node": devices})
        wider = Change(
            overrides=(*change.overrides, f"parallel.devices_per_node={devices}"),
            train=change.train.model_copy(update={"parallel": more}),
            costs=change.costs | {"devices"},
        )
        yield _with_batch(wider, micro, per_rank // micro)


def _with_batch(change: Change, micro: int, accum: int) -> Change:
    loop = change.train.train
    if (micro, accum) == (loop.micro_batch, loop.grad_accum):
        return change
    kept = tuple(w for w in change.overrides if not w.startswith(("train.micro_batch=", "train.grad_accum=")))
    smaller = loop.model_copy(update={"micro_batch": micro, "grad_accum": accum})
    costs: frozenset[Cost] = change.costs if micro == loop.micro_batch else change.costs | {"micro_batch"}
    return Change(
        overrides=(*kept, f"train.micro_batch={micro}", f"train.grad_accum={accum}"),
        train=change.train.model_copy(update={"train": smaller}),
        costs=costs,
    )
