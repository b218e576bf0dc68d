"""Verdicts and their words."""

import pytest

from orchestrator.memory.formula import estimate
from orchestrator.oomguard import judge, margin_bytes
from tests.specs import train_spec

GIB = 1024**3
SPEC = train_spec("model=behemoth", "device=a100_40gb")
PREDICTED = estimate(SPEC)
PEAK = PREDICTED.peak_device_bytes or 0
MARGIN = margin_bytes(SPEC, PREDICTED) or 0


@pytest.mark.parametrize(
    ("usable_bytes", "verdict"),
    [
        (PEAK + MARGIN, "fits"),
        (PEAK + MARGIN - 1, "tight"),
        (PEAK, "tight"),
        (PEAK - 1, "does_not_fit"),
    ],
)
def test_a_run_fits_with_the_margin_and_is_tight_without(usable_bytes: int, verdict: str) -> None:
    assert judge(SPEC, PREDICTED, usable_bytes).verdict == verdict


def test_a_refusal_names_the_peak_the_usable_bytes_the_instant_and_the_largest_term() -> None:
    spec = train_spec("model=behemoth", "device=a100_40gb", "train.micro_batch=64")
    verdict = judge(spec, estimate(spec), spec.device.usable_bytes)
    assert verdict.verdict == "does_not_fit"
    assert verdict.reason.startswith("does not fit: ")
    for word in ("of 39.4 GiB usable", "in backward, block 31", "activations"):
        assert word in verdict.reason


def test_the_budget_takes_its_share_of_the_device() -> None:
    spec = train_spec("model=behemoth", "device=a100_40gb", "budget.max_device_memory_fraction=0.25")
    verdict = judge(spec, estimate(spec), spec.device.usable_bytes)
    assert verdict.usable_bytes == int((spec.device.usable_bytes or 0) * 0.25)
    assert verdict.verdict == "does_not_fit"
    assert "budget.max_device_memory_fraction=0.25" in verdict.reason


def test_an_estimate_that_is_unknown_makes_the_verdict_unknown_with_its_reason() -> None:
    spec = train_spec("train.precision=bf16", "device=a100_40gb")
    verdict = judge(spec, estimate(spec), spec.device.usable_bytes)
    assert verdict.verdict == "unknown"
    assert verdict.margin_bytes is None
    assert verdict.reason.startswith("train.precision=bf16: ")


def test_usable_bytes_that_nobody_knows_make_the_verdict_unknown() -> None:
    verdict = judge(SPEC, PREDICTED, None)
    assert verdict.verdict == "unknown"
    assert "device.usable_bytes=null" in verdict.reason


def test_the_margin_is_what_the_device_may_hold_idle_beside_the_tensors() -> None:
    assert margin_bytes(SPEC, PREDICTED) == int((PREDICTED.peak_allocated_bytes or 0) * 0.70)
