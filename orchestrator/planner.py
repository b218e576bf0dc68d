"""From a verdict to a plan: settings that would fit, cheapest change first, and what the budget says.

Takes a RunSpec whose device is resolved, and its Verdict; gives a Plan. Every alternative keeps the tokens of an
optimizer step and is judged like the run itself. It must not import torch.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from orchestrator import oomguard
from orchestrator.device import visible_gpus
from orchestrator.memory.formula import estimate, recompute_flops_fraction
from orchestrator.oomguard import Verdict
from orchestrator.spec import RunSpec
from train.spec import CkptSpec, Spec, TrainSpec

_MOST_ALTERNATIVES = 5
_MOST_DEVICES = 8
_OPTION_EVERY = 2  # of conf/ckpt/selective.yaml; tests/test_planner.py composes each alternative


class Alternative(Spec):
    """Overrides, to be added to the command line, with which the run fits."""

    overrides: tuple[str, ...]
    peak_device_bytes: int
    recompute_flops_fraction: float
    """Of the alternative as a whole, not the difference."""
    verdict: Literal["fits", "tight"]


class Budget(Spec):
    """What the run will take of its budget, as far as it can be told before the start."""

    device_hours: float | None
    reason: str
    """Why there is no number, or where it comes from."""


class Plan(Spec):
    """All that is known of a run before it is started."""

    verdict: Verdict
    alternatives: tuple[Alternative, ...]
    """Cheapest change first; empty for a run that fits."""
    budget: Budget
    over_budget: str | None
    """Which limit of the budget the run would pass, None where it keeps to all."""
    notes: tuple[str, ...]
    """What the estimate assumed."""


class _Change(Spec):
    """A way to make the run smaller: as overrides and as a spec."""

    overrides: tuple[str, ...]
    train: TrainSpec


def plan(spec: RunSpec, verdict: Verdict) -> Plan:
    """The plan of a judged run."""
    wanted = verdict.verdict in ("does_not_fit", "tight")
    return Plan(
        verdict=verdict,
        alternatives=alternatives(spec, verdict.verdict == "tight") if wanted else (),
        budget=Budget(device_hours=None, reason="nobody has measured the speed of this config on this device"),
        over_budget=_over_budget(spec.train),
        notes=verdict.estimate.notes,
    )


def alternatives(spec: RunSpec, only_fits: bool) -> tuple[Alternative, ...]:
    """At most five: recomputing more, then smaller micro-batches, then more devices, then these together.

    `only_fits` leaves out those that are tight themselves; otherwise they come only where nothing fits better.
    """
    judged: dict[tuple[str, ...], Alternative] = {}
    at_most = len(visible_gpus()) if spec.choices.get("device") == "auto" else _MOST_DEVICES
    for group in _groups(spec.train, at_most):
        for change in group:
            found = _judge(change, spec.overrides)
            if found is not None and (found.verdict == "fits" or not only_fits):
                judged.setdefault(found.overrides, found)
                if found.verdict == "fits":
                    break
    found_all = _each_once(judged.values())
    fitting = [a for a in found_all if a.verdict == "fits"]
    return tuple((fitting or found_all)[:_MOST_ALTERNATIVES])


def _each_once(found: Iterable[Alternative]) -> list[Alternative]:
    """Of two ways to the same memory and the same recomputation, the one with fewer words."""
    best: dict[tuple[int, float], Alternative] = {}
    for alternative in found:
        key = (alternative.peak_device_bytes, alternative.recompute_flops_fraction)
        if key not in best or len(alternative.overrides) < len(best[key].overrides):
            best[key] = alternative
    return list(best.values())


def _judge(change: _Change, typed: tuple[str, ...]) -> Alternative | None:
    """The change as an alternative to what was typed, None where it does not fit or passes the budget."""
    train = change.train
    verdict = oomguard.judge(train, estimate(train), train.device.usable_bytes)
    peak = verdict.estimate.peak_device_bytes
    if verdict.verdict not in ("fits", "tight") or peak is None or _over_budget(train) is not None:
        return None
    return Alternative.model_validate(
        {
            "overrides": change.overrides + _undone(change, typed),
            "peak_device_bytes": peak,
            "recompute_flops_fraction": recompute_flops_fraction(train),
            "verdict": verdict.verdict,
        }
    )


def _undone(change: _Change, typed: tuple[str, ...]) -> tuple[str, ...]:
    """What was typed about the blocks to recompute and would stand in the way of another ckpt option."""
    if not any(word.startswith("ckpt=") for word in change.overrides):
        return ()
    names = (f"ckpt.{name}" for name in ("every", "layers", "first") if getattr(change.train.ckpt, name) is None)
    return tuple(f"{n}=null" for n in names if any(word.lstrip("+").startswith(f"{n}=") for word in typed))


def _groups(spec: TrainSpec, at_most: int) -> Iterator[Iterator[_Change]]:
    """Ways to save memory; of each way, cheapest first, the first one that fits is taken."""
    unchanged = _Change(overrides=(), train=spec)
    yield _first_blocks(spec)
    yield _selective(unchanged)
    yield _full(unchanged)
    yield _smaller_micro_batch(unchanged)
    for full in _full(unchanged):
        yield _smaller_micro_batch(full)
    yield _more_devices(unchanged, at_most)
    for full in _full(unchanged):
        yield _more_devices(full, at_most)
        for smallest in list(_smaller_micro_batch(full))[-1:]:
            yield _more_devices(smallest, at_most)


def _first_blocks(spec: TrainSpec) -> Iterator[_Change]:
    """ckpt.first=n for more and more blocks, in eighths of the model."""
    layers = spec.model.num_layers
    now = len(spec.ckpt.layers_recomputed(layers))
    for count in sorted({max(1, -(-layers * eighth // 8)) for eighth in range(1, 8)}):
        if now < count < layers:
            yield _with_ckpt(spec, "selective", count)


def _selective(change: _Change) -> Iterator[_Change]:
    """The option as it is, every second block."""
    spec = change.train
    if len(spec.ckpt.layers_recomputed(spec.model.num_layers)) < spec.model.num_layers // _OPTION_EVERY:
        yield _with_ckpt(spec, "selective", None)


def _full(change: _Change) -> Iterator[_Change]:
    spec = change.train
    if len(spec.ckpt.layers_recomputed(spec.model.num_layers)) < spec.model.num_layers:
        yield _with_ckpt(spec, "full", None)


def _with_ckpt(spec: TrainSpec, policy: Literal["selective", "full"], first: int | None) -> _Change:
    """The option with its own settings: every=2 of conf/ckpt/selective.yaml, unless first takes its place."""
    selective = policy == "selective"
    ckpt = CkptSpec(policy=policy, every=_OPTION_EVERY if selective else None, layers=None, first=first)
    words = (f"ckpt={policy}",) if first is None else (f"ckpt={policy}", f"ckpt.first={first}")
    return _Change(overrides=words, train=spec.model_copy(update={"ckpt": ckpt}))


def _smaller_micro_batch(change: _Change) -> Iterator[_Change]:
    """Fewer sequences at a time and more accumulation, largest micro-batch first."""
    loop = change.train.train
    for micro in range(loop.micro_batch - 1, 0, -1):
        if loop.micro_batch % micro == 0:
            yield _with_batch(change, micro, loop.grad_accum * (loop.micro_batch // micro), ())


def _more_devices(change: _Change, at_most: int) -> Iterator[_Change]:
    """Parameters and optimizer states over more devices of one machine, fewest first."""
    parallel, loop = change.train.parallel, change.train.train
    if change.train.device.kind != "cuda" or parallel.shard != "fsdp":
        return
    sequences = loop.micro_batch * loop.grad_accum * parallel.world_size
    for devices in range(parallel.devices_per_node + 1, at_most + 1):
        per_rank, rest = divmod(sequences, devices * parallel.nodes)
        if rest or per_rank == 0:
            continue
        micro = max(m for m in range(1, loop.micro_batch + 1) if per_rank % m == 0)
        more = parallel.model_copy(update={"devices_per_node": devices})
        train = change.train.model_copy(update={"parallel": more})
        words = (f"parallel.devices_per_node={devices}",)
        yield _with_batch(_Change(overrides=change.overrides, train=train), micro, per_rank // micro, words)


def _with_batch(change: _Change, micro: int, accum: int, words: tuple[str, ...]) -> _Change:
    loop = change.train.train
    batch: tuple[str, ...] = ()
    if (micro, accum) != (loop.micro_batch, loop.grad_accum):
        batch = (f"train.micro_batch={micro}", f"train.grad_accum={accum}")
    smaller = loop.model_copy(update={"micro_batch": micro, "grad_accum": accum})
    kept = tuple(w for w in change.overrides if not w.startswith(("train.micro_batch=", "train.grad_accum=")))
    return _Change(
        overrides=kept + words + batch,
        train=change.train.model_copy(update={"train": smaller}),
    )


def _over_budget(spec: TrainSpec) -> str | None:
    limit = spec.budget.max_recompute_fraction
    fraction = recompute_flops_fraction(spec)
    if limit is not None and fraction > limit:
        return (
            f"budget.max_recompute_fraction={limit}: this run recomputes {fraction:.1%} of its step's FLOPs. "
            "Recompute fewer blocks (ckpt.every, ckpt.first), or raise the limit."
        )
    return None
