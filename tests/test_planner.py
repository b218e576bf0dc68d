"""Alternatives: they fit, they keep the tokens of a step, the cheapest change comes first."""

import pytest

from orchestrator import planner
from orchestrator.memory.formula import estimate
from orchestrator.oomguard import judge
from orchestrator.planner import Plan
from orchestrator.preflight import judge as preflight
from tests.specs import run_spec, train_spec

TOO_LARGE = ("model=behemoth", "ckpt=none", "device=a100_40gb", "train.micro_batch=64")


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "visible_gpus", lambda: ())


def plan_of(*overrides: str) -> Plan:
    return preflight(run_spec(*overrides))[1]


@pytest.mark.parametrize(
    "overrides",
    [
        TOO_LARGE,
        ("model=titan", "device=rtx_4090", "train.micro_batch=16"),
        ("model=llama2_7b", "device=a100_80gb", "train.precision=bf16_mixed", "train.micro_batch=8"),
        ("model=behemoth", "device=rtx_3090", "train.micro_batch=24", "ckpt=selective", "ckpt.layers=[0,1,2]"),
        ("model=behemoth", "device=rtx_3090", "train.micro_batch=32", "ckpt=selective", "ckpt.first=2"),
        ("model=behemoth", "device=rtx_3090", "train.micro_batch=32", "ckpt=selective", "ckpt.every=8"),
    ],
)
def test_each_alternative_fits_when_it_is_added_to_the_command_line(overrides: tuple[str, ...]) -> None:
    plan = plan_of(*overrides)
    assert plan.verdict.verdict == "does_not_fit"
    assert 1 <= len(plan.alternatives) <= 5
    before = train_spec(*overrides)
    for alternative in plan.alternatives:
        spec = train_spec(*overrides, *alternative.overrides)
        verdict = judge(spec, estimate(spec), spec.device.usable_bytes)
        assert verdict.verdict == alternative.verdict
        assert verdict.verdict in ("fits", "tight")
        assert verdict.estimate.peak_device_bytes == alternative.peak_device_bytes
        assert verdict.estimate.recompute_flops_fraction == alternative.recompute_flops_fraction
        assert spec.tokens_per_step == before.tokens_per_step


def test_recomputing_comes_before_smaller_micro_batches_and_these_before_more_devices() -> None:
    words = [alternative.overrides[0] for alternative in plan_of(*TOO_LARGE).alternatives]
    assert words[0] == "ckpt=full"
    assert words[1].startswith("train.micro_batch=")
    assert words.index(words[1]) < next(i for i, w in enumerate(words) if w.startswith("parallel."))


def test_as_few_blocks_recompute_as_will_do() -> None:
    run = ("model=behemoth", "device=a100_40gb", "train.micro_batch=15")
    assert plan_of(*run).alternatives[0].overrides == ("ckpt=selective", "ckpt.first=16")
    assert plan_of(*run, "ckpt=selective", "ckpt.first=12").verdict.verdict == "tight"


def test_a_run_that_fits_has_no_alternatives() -> None:
    assert plan_of("model=tiny", "device=a100_40gb").alternatives == ()


def test_a_tight_run_is_offered_only_what_has_room() -> None:
    plan = plan_of("model=behemoth", "device=a100_40gb", "train.micro_batch=15")
    assert {alternative.verdict for alternative in plan.alternatives} == {"fits"}


def test_nothing_is_offered_where_nothing_fits() -> None:
    plan = plan_of("model=llama3_405b", "device=rtx_3090", "train.precision=bf16_mixed")
    assert plan.verdict.verdict == "does_not_fit"
    assert plan.alternatives == ()


def test_alternatives_keep_to_the_budget_of_recomputation() -> None:
    plan = plan_of(*TOO_LARGE, "budget.max_recompute_fraction=0.1")
    assert plan.alternatives
    assert all(alternative.recompute_flops_fraction <= 0.1 for alternative in plan.alternatives)


def test_a_run_that_recomputes_more_than_its_budget_is_over_it() -> None:
    plan = plan_of("model=tiny", "device=a100_40gb", "ckpt=full", "budget.max_recompute_fraction=0.1")
    assert plan.over_budget is not None
    assert plan.over_budget.startswith("budget.max_recompute_fraction=0.1: ")


def test_only_the_devices_of_this_machine_are_offered_where_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "visible_gpus", lambda: ("0", "1"))
    seen, named = preflight(run_spec(*TOO_LARGE))
    here = seen.model_copy(update={"choices": seen.choices | {"device": "auto"}})
    found = planner.plan(here, named.verdict).alternatives
    words = [word for a in found for word in a.overrides if word.startswith("parallel.")]
    assert set(words) == {"parallel.devices_per_node=2"}


def test_device_hours_stay_unknown_until_a_speed_was_measured() -> None:
    budget = plan_of("model=tiny", "device=a100_40gb").budget
    assert budget.device_hours is None
    assert budget.reason
