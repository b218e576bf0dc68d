"""Verdicts, their margins and their words."""

import pytest

from orchestrator.memory.formula import estimate
from orchestrator.oomguard import LEAST_ROWS, Miss, Misses, judge, tensors_bytes
from tests.specs import train_spec

GIB = 1024**3
SPEC = train_spec("model=behemoth", "device=a100_40gb")
PREDICTED = estimate(SPEC)
PEAK = PREDICTED.peak_device_bytes or 0
TENSORS = tensors_bytes(PEAK, PREDICTED.terms)
MARGIN = judge(SPEC, PREDICTED, PEAK).margin_bytes or 0
CPU_SPEC = train_spec("model=behemoth", "device=cpu", "device.context_bytes=0", "device.workspace_bytes=0")


def misses(rows: int, share: float = 0.0, out_of_memory: int = 0, tensors: int = TENSORS) -> Misses:
    """So many runs of one size; one was under-predicted by `share`, the others were over-predicted."""
    found = tuple(Miss(tensors_bytes=tensors, share=share if number == 0 else -0.1) for number in range(rows))
    return Misses(rows=found, out_of_memory=out_of_memory)


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
    assert MARGIN > 0
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
    spec = train_spec("train.compile=true", "device=a100_40gb")
    verdict = judge(spec, estimate(spec), spec.device.usable_bytes)
    assert verdict.verdict == "unknown"
    assert (verdict.margin_bytes, verdict.margin_source) == (None, None)
    assert verdict.reason.startswith("train.compile=true: ")


def test_usable_bytes_that_nobody_knows_make_the_verdict_unknown() -> None:
    verdict = judge(SPEC, PREDICTED, None)
    assert verdict.verdict == "unknown"
    assert "device.usable_bytes=null" in verdict.reason


def test_the_documented_bound_on_cuda_is_on_reserved_over_allocated_bytes() -> None:
    allocated, reserved = PREDICTED.peak_allocated_bytes or 0, PREDICTED.peak_reserved_bytes or 0
    assert reserved > allocated
    assert judge(SPEC, PREDICTED, PEAK).margin_bytes == int(allocated * 1.7) - reserved


def test_no_margin_is_left_where_the_predicted_reserved_bytes_pass_the_documented_bound() -> None:
    above = PREDICTED.model_copy(update={"peak_reserved_bytes": 2 * (PREDICTED.peak_allocated_bytes or 0)})
    assert judge(SPEC, above, PEAK).margin_bytes == 0
    assert judge(SPEC, above, PEAK).verdict == "fits"


def test_the_documented_bound_on_cpu_is_a_share_of_the_tensors() -> None:
    predicted = estimate(CPU_SPEC)
    margin = judge(CPU_SPEC, predicted, 64 * GIB).margin_bytes
    assert margin == int((predicted.peak_allocated_bytes or 0) * 0.05)


def test_the_margin_is_read_from_twenty_measured_runs_and_documented_before() -> None:
    before, after = (judge(SPEC, PREDICTED, PEAK, misses(rows, 0.05)) for rows in (LEAST_ROWS - 1, LEAST_ROWS))
    assert before.margin_bytes == MARGIN
    assert "documented bound" in (before.margin_source or "")
    assert "until 20 runs of at least a quarter of its size are measured, 19 so far" in (before.margin_source or "")
    assert after.margin_bytes == int(TENSORS * 0.05)
    assert after.margin_source == (
        "largest under-prediction of 20 measured runs of at least a quarter of its size, 5.0% of the tensors"
    )


def test_the_constants_of_a_device_are_no_tensors() -> None:
    terms = {"activations": 600, "allocator_idle": 20, "context": 300, "nccl": 70, "workspace": 10}
    assert tensors_bytes(1000, terms) == 620
    reserved, workspace = PREDICTED.peak_reserved_bytes or 0, SPEC.device.workspace_bytes or 0
    assert tensors_bytes(PEAK, PREDICTED.terms) == reserved - workspace


def test_a_run_of_less_than_a_quarter_of_the_tensors_says_nothing_of_the_margin() -> None:
    quarter = -(-TENSORS // 4)
    small, enough = (judge(SPEC, PREDICTED, PEAK, misses(20, 0.01, tensors=size)) for size in (quarter - 1, quarter))
    assert small.margin_bytes == MARGIN
    assert "0 so far" in (small.margin_source or "")
    assert enough.margin_bytes == int(TENSORS * 0.02)


def test_only_runs_of_its_size_count_for_the_largest_under_prediction() -> None:
    mixed = Misses(rows=misses(20, 0.03).rows + misses(5, 0.5, tensors=TENSORS // 5).rows, out_of_memory=0)
    assert judge(SPEC, PREDICTED, PEAK, mixed).margin_bytes == int(TENSORS * 0.03)
    assert mixed.measured_up_to_bytes == 4 * TENSORS
    assert misses(19).measured_up_to_bytes is None


def test_twenty_tiny_runs_leave_a_large_one_tight() -> None:
    large, tiny = (train_spec("device=a100_40gb", *run) for run in (("model=behemoth", "train.micro_batch=15"), ()))
    predicted = estimate(tiny)
    tensors = tensors_bytes(predicted.peak_device_bytes or 0, predicted.terms)
    for known in (None, misses(20, 0.01, tensors=tensors)):
        assert judge(large, estimate(large), large.device.usable_bytes, known).verdict == "tight"


def test_runs_that_were_never_under_predicted_leave_the_noise_of_one_code_path_as_margin() -> None:
    verdict = judge(SPEC, PREDICTED, PEAK, misses(40, 0.001))
    assert verdict.margin_bytes == int(TENSORS * 0.02)
    assert "at least 2%" in (verdict.margin_source or "")


def test_a_margin_of_measured_runs_may_be_wider_than_the_documented_bound() -> None:
    assert judge(SPEC, PREDICTED, PEAK, misses(20, 0.9)).margin_bytes == int(TENSORS * 0.9) > MARGIN


def test_accepted_runs_that_ended_out_of_memory_keep_the_margin_from_falling_below_the_documented_bound() -> None:
    verdict = judge(SPEC, PREDICTED, PEAK, misses(40, 0.03, out_of_memory=1))
    assert verdict.margin_bytes == MARGIN
    assert "1 accepted run(s) ended out of memory" in (verdict.margin_source or "")
    assert judge(SPEC, PREDICTED, PEAK, misses(40, 0.9, out_of_memory=1)).margin_bytes == int(TENSORS * 0.9)


def test_a_tight_run_is_told_which_margin_made_it_so() -> None:
    for known in (None, misses(25, 0.04)):
        verdict = judge(SPEC, PREDICTED, PEAK, known)
        assert verdict.verdict == "tight"
        assert verdict.margin_source is not None
        assert verdict.margin_source in verdict.reason
