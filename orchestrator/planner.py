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
        alternatives=alternatives(spec.train, verdict.verdict == "tight") if wanted else (),
        budget=Budget(device_hours=None, reason="nobody has measured the speed of this config on this device"),
        over_budget=_over_budget(spec.train),
        notes=verdict.estimate.notes,
    )


def alternatives(spec: TrainSpec, only_fits: bool) -> tuple[Alternative, ...]:
    """At most five: recomputing more, then smaller micro-batches, then more devices, then these together.

    `only_fits` leaves out those that are tight themselves; otherwise they come only where nothing fits better.
    """
    judged: dict[tuple[str, ...], Alternative] = {}
    for group in _groups(spec):
        for change in group:
            found = _judge(change)
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


def _judge(change: _Change) -> Alternative | None:
    """The change as an alternative, None where it does not fit or passes the budget."""
    train = change.train
    verdict = oomguard.judge(train, estimate(train), train.device.usable_bytes)
    peak = verdict.estimate.peak_device_bytes
    if verdict.verdict not in ("fits", "tight") or peak is None or _over_budget(train) is not None:
        return None
    return Alternative.model_validate(
        {
            "overrides": change.overrides,
            "peak_device_bytes": peak,
            "recompute_flops_fraction": recompute_flops_fraction(train),
            "verdict": verdict.verdict,
        }
    )


def _groups(spec: TrainSpec) -> Iterator[Iterator[_Change]]:
    """Ways to save memory; of each way, cheapest first, the first one that fits is taken."""
    unchanged = _Change(overrides=(), train=spec)
    yield _first_blocks(spec)
    yield iter([c for c in (_selective(unchanged, every=2),) if c is not None])
    yield _full(unchanged)
    yield _smaller_micro_batch(unchanged)
    for full in _full(unchanged):
        yield _smaller_micro_batch(full)
    yield _more_devices(unchanged)
    for full in _full(unchanged):
        yield _more_devices(full)
        for smallest in list(_smaller_micro_batch(full))[-1:]:
            yield _more_devices(smallest)


def _first_blocks(spec: TrainSpec) -> Iterator[_Change]:
    """ckpt.first=n for more and more blocks, in eighths of the model."""
    layers = spec.model.num_layers
    now = len(spec.ckpt.layers_recomputed(layers))
    for count in sorted({max(1, -(-layers * eighth // 8)) for eighth in range(1, 8)}):
        if now < count < layers:
            yield _with_ckpt(spec, "selective", None, count)


def _selective(change: _Change, every: int) -> _Change | None:
    spec = change.train
    now = len(spec.ckpt.layers_recomputed(spec.model.num_layers))
    return _with_ckpt(spec, "selective", every, None) if now < spec.model.num_layers // every else None


def _full(change: _Change) -> Iterator[_Change]:
    spec = change.train
    if len(spec.ckpt.layers_recomputed(spec.model.num_layers)) < spec.model.num_layers:
        yield _with_ckpt(spec, "full", None, None)


def _with_ckpt(spec: TrainSpec, policy: Literal["selective", "full"], every: int | None, first: int | None) -> _Change:
    ckpt = CkptSpec(policy=policy, every=every or spec.ckpt.every, layers=None, first=first)
    words = [f"ckpt={policy}"]
    if policy == "selective":
        if spec.ckpt.layers is not None:
            words.append("ckpt.layers=null")
        if first is not None:
            words.append(f"ckpt.first={first}")
        elif spec.ckpt.first is not None:
            words.append("ckpt.first=null")
        if every is not None and spec.ckpt.policy == "selective":
            words.append(f"ckpt.every={every}")
    return _Change(overrides=tuple(words), train=spec.model_copy(update={"ckpt": ckpt}))


def _smaller_micro_batch(change: _Change) -> Iterator[_Change]:
    """Fewer sequences at a time and more accumulation, largest micro-batch first."""
    loop = change.train.train
    for micro in range(loop.micro_batch - 1, 0, -1):
        if loop.micro_batch % micro == 0:
            yield _with_batch(change, micro, loop.grad_accum * (loop.micro_batch // micro), ())


def _more_devices(change: _Change) -> Iterator[_Change]:
    """Parameters and optimizer states over more devices of one machine, fewest first."""
    parallel, loop = change.train.parallel, change.train.train
    if change.train.device.kind != "cuda" or parallel.shard != "fsdp":
        return
    at_most = len(visible_gpus()) or _MOST_DEVICES
    sequences = loop.micro_batch * loop.grad_accum * parallel.world_size
    for devices in range(parallel.devices_per_node + 1, min(at_most, _MOST_DEVICES) + 1):
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
