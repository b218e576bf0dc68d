"""From a verdict to a plan: settings that would fit, cheapest first, the largest micro-batch, and what the budget says.

Takes a RunSpec whose device is resolved, its Verdict and what finished runs showed; gives a Plan. Every alternative
keeps the tokens of an optimizer step and is judged like the run itself. It must not import torch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Literal

from orchestrator import changes, oomguard
from orchestrator.changes import Change, Save
from orchestrator.device import visible_gpus
from orchestrator.memory.formula import estimate
from orchestrator.oomguard import Misses, Verdict
from orchestrator.spec import RunSpec
from orchestrator.worth import Worth, worth
from train.spec import CkptSpec, LoopSpec, ParallelSpec, Spec, TrainSpec

_MOST_ALTERNATIVES = 5
_MOST_DEVICES = 8
_OPTION_BLOCKS = 2
"""Blocks that ckpt=selective needs at least: it recomputes every second one."""
_STEP = 0.95
"""Of the memory of a cheaper alternative, or of a shorter one, at most, or a dearer one is not worth a line."""
_NO_TENSORS = {"context", "nccl", "workspace", "allocator_idle"}
"""Terms of a peak that no setting of the loss changes."""
Level = Literal["fits", "tight"]


class Alternative(Spec):
    """Overrides, to be added to the command line, with which the run fits."""

    overrides: tuple[str, ...]
    peak_device_bytes: int
    recompute_flops_fraction: float
    """Of the alternative as a whole, not the difference."""
    verdict: Level


class Budget(Spec):
    """What the run will take of its budget, as far as it can be told before the start."""

    device_hours: float | None
    reason: str
    """Why there is no number, or where it comes from."""


class Plan(Spec):
    """All that is known of a run before it is started."""

    verdict: Verdict
    alternatives: tuple[Alternative, ...]
    """Cheapest first; empty for a run that fits."""
    tried: tuple[str, ...]
    """What the search for them judged, for a person; empty for a run that fits."""
    largest_micro_batch: int | None
    """Largest train.micro_batch whose verdict is `fits`, all else as it is; None: not even 1, or not known."""
    checkpointing: Worth | None
    """What checkpointing costs and saves at this scale; None where the estimate is unknown."""
    budget: Budget
    over_budget: str | None
    """Which limit of the budget the run would pass, None where it keeps to all."""
    notes: tuple[str, ...]
    """What the estimate assumed."""


def plan(spec: RunSpec, verdict: Verdict, misses: Misses | None) -> Plan:
    """The plan of a judged run; `misses` as in oomguard.judge."""
    bench = _Bench(spec, verdict, misses)
    wanted = verdict.verdict in ("does_not_fit", "tight")
    alternatives = _alternatives(spec, bench, verdict.verdict == "tight") if wanted else ()
    return Plan(
        verdict=verdict,
        alternatives=alternatives,
        tried=bench.tried() if wanted else (),
        largest_micro_batch=_largest_micro_batch(spec.train, bench),
        checkpointing=worth(spec.train, verdict, bench.verdict),
        budget=Budget(device_hours=None, reason="nobody has measured the speed of this config on this device"),
        over_budget=_over_budget(spec.train, verdict.estimate.recompute_flops_fraction),
        notes=verdict.estimate.notes,
    )


class _Bench:
    """Judges specs as the run itself was judged, each once."""

    def __init__(self, spec: RunSpec, verdict: Verdict, misses: Misses | None) -> None:
        self.misses = misses
        self.typed = spec.overrides
        self.run = spec.train
        self.known = {_key(spec.train): verdict}

    def verdict(self, train: TrainSpec) -> Verdict:
        key = _key(train)
        if key not in self.known:
            self.known[key] = oomguard.judge(train, estimate(train), train.device.usable_bytes, self.misses)
        return self.known[key]

    def tried(self) -> tuple[str, ...]:
        """What the specs that were judged have and the run has not, in the words of a sentence."""
        run, words = self.run, dict[str, bool]()
        for ckpt, loop, parallel in self.known:
            now = {
                "recomputing all blocks": ckpt.policy == "full" != run.ckpt.policy,
                "micro-batches of 1": loop.micro_batch == 1 < run.train.micro_batch,
                "the loss in chunks": loop.loss == "chunked" != run.train.loss,
                "more devices": parallel.world_size > run.parallel.world_size,
                "train.precision=bf16_mixed": loop.precision == "bf16_mixed" != run.train.precision,
            }
            words = {word: seen or words.get(word, False) for word, seen in now.items()}
        return tuple(word for word, seen in words.items() if seen)

    def alternative(self, change: Change, level: Level) -> Alternative | None:
        """The change as an alternative, None where its verdict is worse than `level` or it passes the budget."""
        verdict = self.verdict(change.train)
        peak, fraction = verdict.estimate.peak_device_bytes, verdict.estimate.recompute_flops_fraction
        if verdict.verdict == "tight" and level == "fits":
            return None
        if verdict.verdict not in ("fits", "tight") or peak is None or fraction is None:
            return None
        if _over_budget(change.train, fraction) is not None:
            return None
        return Alternative.model_validate(
            {
                "overrides": change.overrides,
                "peak_device_bytes": peak,
                "recompute_flops_fraction": fraction,
                "verdict": verdict.verdict,
            }
        )


def _key(train: TrainSpec) -> tuple[CkptSpec, LoopSpec, ParallelSpec]:
    """What an alternative may change."""
    return (train.ckpt, train.train, train.parallel)


def _alternatives(spec: RunSpec, bench: _Bench, only_fits: bool) -> tuple[Alternative, ...]:
    """At most five that fit; those that are tight only where nothing fits better, and never for a tight run."""
    at_most = len(visible_gpus()) if spec.choices.get("device") == "auto" else _MOST_DEVICES
    levels: tuple[Level, ...] = ("fits",) if only_fits else ("fits", "tight")
    for level in levels:
        found = _Search(spec.train, bench, level, at_most).found()
        if found:
            return found
    return ()


class _Found:
    """A change and the alternative that it makes."""

    def __init__(self, change: Change, alternative: Alternative) -> None:
        self.change, self.alternative = change, alternative
        self.cost = (alternative.recompute_flops_fraction, len(alternative.overrides), alternative.peak_device_bytes)


class _Search:
    """All ways to a verdict of at least `level`: on the same devices, on more of them, in another precision.

    Within each of these by added FLOPs. More devices come after, as they must be had, and another precision last, as it
    changes what is computed. Changes are put together only where none does it alone.
    """

    def __init__(self, spec: TrainSpec, bench: _Bench, level: Level, at_most_devices: int) -> None:
        self.bench, self.level, self.at_most_devices = bench, level, at_most_devices
        self.run = changes.unchanged(spec)

    def found(self) -> tuple[Alternative, ...]:
        """At most five, none of them dominated."""
        starts = self.starts(self.run)
        here = self.same_devices(starts)
        wider = self.wider(starts, together=not here)
        mixed = self.other_precision(together=not here and not wider)
        every = here + wider + mixed
        here, wider, mixed = ([one for one in tier if not _dominated(one, every)] for tier in (here, wider, mixed))
        rest = (wider + mixed)[: _MOST_ALTERNATIVES - 1]
        chosen = _spread(_steps(here), _MOST_ALTERNATIVES - len(rest)) + rest
        return tuple(each.alternative for each in chosen)

    def starts(self, change: Change) -> list[Change]:
        """The change as it is, and with the loss in chunks where the logits are the most at its peak.

        Or once all blocks recompute: without their activations the logits may be the largest term.
        """
        if change.train.train.loss == "chunked":
            return [change]
        peaks = (change, self.with_ckpt(change, "full", None))
        logits_matter = any(self.largest_term(each) == "loss" for each in peaks)
        return [change, changes.chunked_loss(change)] if logits_matter else [change]

    def largest_term(self, change: Change) -> str | None:
        """Of the tensors at the peak; None where nobody can tell."""
        terms = self.bench.verdict(change.train).estimate.terms
        return max(terms.keys() - _NO_TENSORS, key=lambda name: terms[name] or 0, default=None)

    def same_devices(self, starts: Sequence[Change]) -> list[_Found]:
        """One change alone, by added FLOPs; if none does it, recomputation with a smaller micro-batch.

        The loss in chunks goes with each: it costs nothing.
        """
        found = self.fitting(starts)
        for start in starts:
            found += self.recomputing(start) + self.largest_fitting(start)
        if not any(each.change.train.train.loss == starts[0].train.train.loss for each in found):
            policies = chain.from_iterable(map(self.whole_model, starts))
            found += chain.from_iterable(self.largest_fitting(each) for each in policies if not self.fitting([each]))
        return sorted(found, key=lambda each: each.cost)

    def wider(self, starts: Sequence[Change], together: bool) -> list[_Found]:
        """The fewest devices that do, and fewer with the loss in chunks.

        `together`: and fewer with all blocks recomputed, then in micro-batches of 1.
        """
        found, most = list[_Found](), self.at_most_devices
        last = starts[-1]
        full = changes.with_ckpt(last, "full", self.bench.typed)
        for each in (*starts, full, *changes.smaller_micro_batches(full)[-1:]) if together else starts:
            fitting = (one for wider in changes.more_devices(each, most) for one in self.fitting([wider]))
            fewest = next(fitting, None)
            if fewest is not None:
                found.append(fewest)
                most = fewest.change.train.parallel.devices_per_node - 1
        return found

    def other_precision(self, together: bool) -> list[_Found]:
        """bf16_mixed alone; `together`: or with the cheapest change on the same devices, or on more of them."""
        mixed = changes.bf16_mixed(self.run)
        if mixed is None:
            return []
        found = self.fitting([mixed])
        if found or not together:
            return found
        starts = self.starts(mixed)
        return (self.same_devices(starts) or self.wider(starts, together=True))[:1]

    def recomputing(self, start: Change) -> list[_Found]:
        """Of each kind of recomputation the fewest blocks that fit, counted from the first, and all."""
        layers = start.train.model.num_layers
        found = []
        for policy, save in self.kinds(start):
            some: changes.Policy = "ops" if policy == "ops" else "selective"
            first = partial(self.first_blocks, start, some, save)
            whole = self.fitting([self.with_ckpt(start, policy, save)])
            found += self.least(layers - 1, first) + whole if whole else []
        if layers >= _OPTION_BLOCKS:
            found += self.fitting([self.with_ckpt(start, "selective", None)])
        return found

    def first_blocks(self, start: Change, policy: changes.Policy, save: Save | None, index: int) -> Change:
        return self.with_ckpt(start, policy, save, index + 1)

    def kinds(self, start: Change) -> Iterator[tuple[changes.Policy, Save | None]]:
        """Policies over all blocks, from the one that recomputes least."""
        yield from (("ops", save) for save in changes.saves(start.train))
        yield "full", None

    def whole_model(self, start: Change) -> list[Change]:
        return [self.with_ckpt(start, policy, save) for policy, save in self.kinds(start)]

    def with_ckpt(self, start: Change, policy: changes.Policy, save: Save | None, first: int | None = None) -> Change:
        return changes.with_ckpt(start, policy, self.bench.typed, save=save, first=first)

    def largest_fitting(self, change: Change) -> list[_Found]:
        """The largest smaller micro-batch that fits."""
        smaller = changes.smaller_micro_batches(change)
        return self.least(len(smaller), smaller.__getitem__)

    def least(self, count: int, nth: Callable[[int], Change]) -> list[_Found]:
        """The first of `count` changes that fits; each takes no more memory than the one before."""
        low, high, best = -1, count, list[_Found]()
        while high - low > 1:
            middle = (low + high) // 2
            found = self.fitting([nth(middle)])
            low, high = (low, middle) if found else (middle, high)
            best = found or best
        return best

    def fitting(self, among: Iterable[Change]) -> list[_Found]:
        """Those that reach the level; the run itself is none."""
        judged = ((each, self.bench.alternative(each, self.level)) for each in among if each.overrides)
        return [_Found(each, alternative) for each, alternative in judged if alternative is not None]


def _dominated(one: _Found, others: Iterable[_Found]) -> bool:
    """Whether another has no more bytes and FLOPs and costs nothing that `one` does not; of equals the shorter has.

    Where the other only adds words, for no fewer FLOPs, it has to save what is worth a line.
    """

    def better(other: _Found) -> bool:
        mine, its = one.alternative, other.alternative
        fewer = mine.peak_device_bytes - its.peak_device_bytes
        cheaper = mine.recompute_flops_fraction - its.recompute_flops_fraction
        if fewer < 0 or cheaper < 0 or not other.change.costs <= one.change.costs:
            return False
        if cheaper == 0 and set(mine.overrides) < set(its.overrides):
            return its.peak_device_bytes < mine.peak_device_bytes * _STEP
        return fewer > 0 or cheaper > 0 or _words(other) < _words(one)

    return any(better(other) for other in others)


def _words(found: _Found) -> tuple[int, tuple[str, ...]]:
    return len(found.change.overrides), found.change.overrides


def _steps(found: list[_Found]) -> list[_Found]:
    """Without those that take more FLOPs than another and hardly less memory; `found` is sorted by cost."""
    kept: list[_Found] = []
    for one in found:
        most = one.alternative.peak_device_bytes / _STEP
        before = (each for each in kept if each.change.costs <= one.change.costs)
        if all(most <= each.alternative.peak_device_bytes for each in before):
            kept.append(one)
    return kept


def _spread(found: list[_Found], most: int) -> list[_Found]:
    """The cheapest ones, and as the last the one that takes the least memory."""
    if len(found) <= most:
        return found
    least = min(found, key=lambda each: each.alternative.peak_device_bytes)
    cheapest = [each for each in found if each is not least][: most - 1]
    return sorted([*cheapest, least], key=lambda each: each.cost)


def _largest_micro_batch(spec: TrainSpec, bench: _Bench) -> int | None:
    """Gallop, then bisect: the peak grows with the micro-batch."""

    def fits(micro: int) -> bool:
        loop = spec.train.model_copy(update={"micro_batch": micro})
        return bench.verdict(spec.model_copy(update={"train": loop})).verdict == "fits"

    if bench.verdict(spec).verdict == "unknown":
        return None
    low, high = 0, spec.train.micro_batch
    while fits(high):
        low, high = high, 2 * high
    return _largest(fits, low, high) or None


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low`, which holds or is 0, up to `high`, which does not hold."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _over_budget(spec: TrainSpec, fraction: float | None) -> str | None:
    limit = spec.budget.max_recompute_fraction
    if limit is not None and fraction is not None and fraction > limit:
        return (
            f"budget.max_recompute_fraction={limit}: this run recomputes {fraction:.1%} of its step's FLOPs. "
            "Recompute fewer blocks (ckpt=selective ckpt.first=...), keep more of each (ckpt=ops), or raise the limit."
        )
    return None
