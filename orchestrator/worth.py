"""What checkpointing saves and costs a run at its scale: it is a lever where memory is short, never a default.

Takes a TrainSpec, its Verdict and a way to judge others, gives a Worth. It must not import torch.
"""

from collections.abc import Callable

from orchestrator import changes
from orchestrator.oomguard import Verdict
from orchestrator.units import gib
from train.spec import Spec, TrainSpec

_LEAST_SHARE = 0.05
"""Of the peak without checkpointing: what saves less is not worth it."""


class Saving(Spec):
    """A policy beside ckpt=none, all else as it is."""

    overrides: tuple[str, ...]
    """The policy as typed."""
    saved_bytes: int
    """Of the device's peak; negative where the policy takes more."""
    saved_share: float
    """Of the peak without checkpointing."""
    recompute_flops_fraction: float
    """FLOPs that it adds, as a share of a step's without it."""


class Worth(Spec):
    """Whether checkpointing is needed, and whether it is worth it."""

    note: str
    """One line for a person."""
    policy: str
    """ckpt.policy of the run."""
    own: Saving | None
    """Of the run's own policy; null where it is none."""
    full: Saving | None
    """Of ckpt=full; null where nobody can tell."""
    ops: Saving | None
    """Of the preset of ckpt=ops that recomputes less."""


def worth(spec: TrainSpec, verdict: Verdict, judge: Callable[[TrainSpec], Verdict]) -> Worth | None:
    """The run's policy, ckpt=full and the cheapest preset of ckpt=ops against ckpt=none; None where it has no peak."""
    run = changes.unchanged(spec)
    none = judge(changes.with_ckpt(run, "none", ()).train)
    peak = none.estimate.peak_device_bytes
    if verdict.estimate.peak_device_bytes is None or peak is None:
        return None
    policies = [changes.with_ckpt(run, "full", ())]
    policies += [changes.with_ckpt(run, "ops", (), save=preset) for preset in changes.PRESETS]
    full, *found = (_saving(each.overrides, judge(each.train), peak) for each in policies)
    presets = [preset for preset in found if preset is not None]
    ops = min(presets, key=lambda each: each.recompute_flops_fraction, default=None)
    own = None if spec.ckpt.policy == "none" else _saving((f"ckpt={spec.ckpt.policy}",), verdict, peak)
    others = [each for each in (full, ops) if each is not None]
    note = _of_none(verdict, others) if own is None else _of_policy(none, own)
    return Worth(note=note, policy=spec.ckpt.policy, own=own, full=full, ops=ops)


def _saving(overrides: tuple[str, ...], verdict: Verdict, without: int) -> Saving | None:
    """None where the policy has no formula."""
    estimate = verdict.estimate
    if estimate.peak_device_bytes is None or estimate.recompute_flops_fraction is None:
        return None
    saved = without - estimate.peak_device_bytes
    return Saving(
        overrides=overrides,
        saved_bytes=saved,
        saved_share=saved / without,
        recompute_flops_fraction=estimate.recompute_flops_fraction,
    )


def _of_none(verdict: Verdict, others: list[Saving]) -> str:
    """For a run that keeps everything."""
    would = ", ".join(_words(each, "would save", "would take") for each in others)
    little = all(each.saved_share < _LEAST_SHARE for each in others)
    said = ["no checkpointing is needed"] if verdict.verdict == "fits" else []
    said += ["it is not worth it at this scale" if said else "checkpointing is not worth it at this scale"] * little
    return f"{', and '.join(said)}: {would}" if said else would


def _of_policy(none: Verdict, own: Saving) -> str:
    """For a run that has switched a policy on."""
    words = f"{_words(own, 'saves', 'takes')} against ckpt=none"
    if own.saved_bytes < 0:
        return f"a regression, not worth it at this scale: {words}. Set ckpt=none"
    if own.saved_share < _LEAST_SHARE:
        return f"checkpointing is not worth it at this scale: {words}"
    peak = none.estimate.peak_device_bytes
    if none.verdict == "fits" and peak is not None:
        return f"ckpt=none fits too, with {gib(peak)}: {words}"
    return words


def _words(saving: Saving, saves: str, takes: str) -> str:
    name, flops = " ".join(saving.overrides), f"for +{saving.recompute_flops_fraction:.0%} FLOPs"
    if saving.saved_bytes < 0:
        return f"{name} {takes} {gib(-saving.saved_bytes)} more {flops}"
    return f"{name} {saves} {gib(saving.saved_bytes)} ({saving.saved_share:.1%}) {flops}"
