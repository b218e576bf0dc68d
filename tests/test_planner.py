"""Alternatives: they fit, they keep the tokens of a step, the cheapest change comes first."""

import pytest

from orchestrator import planner
from orchestrator.memory.estimate import MemoryEstimate
from orchestrator.memory.formula import estimate
from orchestrator.oomguard import Verdict, judge
from orchestrator.planner import Alternative, Plan
from orchestrator.preflight import judge as preflight
from orchestrator.worth import worth
from tests.specs import run_spec, train_spec
from train.spec import TrainSpec

TOO_LARGE = ("model=behemoth", "ckpt=none", "device=a100_40gb", "train.micro_batch=64")
TIGHT = ("model=behemoth", "device=a100_40gb", "train.micro_batch=15")
LONG = (
    "model=llama3_2_1b",
    "device=h100_80gb",
    "train.precision=bf16_mixed",
    "train.seq_len=32768",
    "train.micro_batch=1",
)
LLAMA3 = ("model=llama3_8b", "device=a100_80gb", "train.precision=bf16_mixed", "parallel=node_8")
LLAMA3_LONG = (*LLAMA3, "train.micro_batch=1", "train.seq_len=32768")
LLAMA3_H100 = (*LLAMA3, "device=h100_80gb")
HOPELESS = ("model=llama3_405b", "device=rtx_3090", "train.precision=bf16_mixed")


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


def test_alternatives_on_the_same_devices_come_by_added_flops_then_more_devices_then_another_precision() -> None:
    seen = set()
    for run in (TOO_LARGE, TIGHT, ("model=behemoth", "device=a100_40gb", "train.micro_batch=17")):
        found = plan_of(*run).alternatives
        tiers = [_tier(alternative) for alternative in found]
        assert tiers == sorted(tiers)
        flops = [a.recompute_flops_fraction for a, tier in zip(found, tiers, strict=True) if tier == 0]
        assert flops == sorted(flops)
        seen |= set(tiers)
    assert seen == {0, 1, 2}


def _tier(alternative: Alternative) -> int:
    words = " ".join(alternative.overrides)
    return 2 if "precision" in words else 1 if "devices" in words else 0


@pytest.mark.parametrize("run", [TOO_LARGE, TIGHT, LONG, LLAMA3_H100])
def test_no_alternative_is_dominated_by_one_that_costs_nothing_else(run: tuple[str, ...]) -> None:
    found = plan_of(*run).alternatives
    assert len(found) > 1
    for one in found:
        for other in found:
            if {w.partition("=")[0] for w in other.overrides} <= {w.partition("=")[0] for w in one.overrides}:
                more_bytes = one.peak_device_bytes > other.peak_device_bytes
                assert not (more_bytes and one.recompute_flops_fraction > other.recompute_flops_fraction)


def test_as_few_blocks_recompute_as_will_do() -> None:
    """The cheapest policy stands at a number of blocks of which one less does not fit."""
    words = next(
        a.overrides for a in plan_of(*TIGHT).alternatives if any(w.startswith("ckpt.first") for w in a.overrides)
    )
    count = int(next(w for w in words if w.startswith("ckpt.first=")).partition("=")[2])
    assert plan_of(*TIGHT, *words).verdict.verdict == "fits"
    assert plan_of(*TIGHT, *words, f"ckpt.first={count - 1}").verdict.verdict == "tight"


def test_the_largest_micro_batch_that_divides_the_run_s_is_offered() -> None:
    found = next(a for a in plan_of(*TOO_LARGE).alternatives if a.overrides[0].startswith("train.micro_batch="))
    micro, accum = (int(word.partition("=")[2]) for word in found.overrides)
    assert micro * accum == 64
    twice = plan_of(*TOO_LARGE, f"train.micro_batch={2 * micro}", f"train.grad_accum={accum // 2}")
    assert twice.verdict.verdict != "fits"


def test_a_loss_in_chunks_is_offered_where_the_logits_are_the_largest_term() -> None:
    in_full = plan_of(*LONG)
    terms = in_full.verdict.estimate.terms
    assert terms["loss"] == max(value or 0 for value in terms.values())
    assert any("train.loss=chunked" in alternative.overrides for alternative in in_full.alternatives)
    assert not any("train.loss=chunked" in alternative.overrides for alternative in plan_of(*TOO_LARGE).alternatives)


def test_a_loss_in_chunks_is_offered_where_the_logits_are_the_largest_term_once_blocks_recompute() -> None:
    for run in (LLAMA3_LONG, LLAMA3_H100):
        plan = plan_of(*run)
        assert plan.verdict.verdict == "does_not_fit"
        found = plan.alternatives
        assert ("ckpt=full", "train.loss=chunked") in [alternative.overrides for alternative in found]
        assert any("ckpt.save=attention" in alternative.overrides for alternative in found)
        assert all(judge_again(*run, *alternative.overrides) == "fits" for alternative in found)


def test_recomputation_goes_with_a_smaller_micro_batch_only_where_it_does_not_fit_by_itself() -> None:
    for run in (LLAMA3_H100, (*LLAMA3_H100, "train.loss=chunked")):
        found = [each.overrides for each in plan_of(*run).alternatives]
        both = [words for words in found if "ckpt" in words[0] and any("micro_batch" in word for word in words)]
        for words in both:
            without = [word for word in words if not word.startswith(("train.micro_batch", "train.grad_accum"))]
            assert judge_again(*run, *without) != "fits"
        assert bool(both) is ("train.loss=chunked" not in run)


def test_a_loss_in_chunks_that_hardly_saves_memory_does_not_take_the_place_of_the_shorter_words() -> None:
    run = ("model=gpt2_xl", "device=a100_40gb", "train.micro_batch=16", "train.seq_len=1024", "parallel=node_8")
    shorter = ("train.micro_batch=2", "train.grad_accum=8")
    in_full, chunked = (estimate(train_spec(*run, *shorter, *more)) for more in ((), ("train.loss=chunked",)))
    peak, less = in_full.peak_device_bytes or 0, chunked.peak_device_bytes or 0
    assert 0.95 * peak < less < peak
    found = [alternative.overrides for alternative in plan_of(*run).alternatives]
    assert shorter in found
    assert ("train.loss=chunked", *shorter) not in found
    assert ("ckpt=full", "train.loss=chunked") in found


def test_what_was_tried_is_named_where_nothing_fits() -> None:
    assert plan_of("model=tiny", "device=a100_40gb").tried == ()
    assert plan_of(*HOPELESS).tried == ("recomputing all blocks", "micro-batches of 1", "more devices")
    fewer = ("parallel.devices_per_node=4", "train.grad_accum=2")
    small = plan_of(*LLAMA3_LONG, "device.usable_bytes=2000000000", *fewer)
    assert small.alternatives == ()
    assert small.tried == ("recomputing all blocks", "the loss in chunks", "more devices")
    cpu = plan_of("model=behemoth", "device=cpu", "device.usable_bytes=2000000000", "device.context_bytes=0")
    assert cpu.tried == ("recomputing all blocks", "micro-batches of 1", "train.precision=bf16_mixed")


@pytest.mark.parametrize(
    ("device", "precision", "offered"),
    [
        ("a100_40gb", "fp32", True),
        ("v100_16gb", "fp32", False),
        ("a100_40gb", "bf16_mixed", False),
        ("cpu", "fp32", True),
    ],
)
def test_bf16_is_offered_to_fp32_on_devices_that_have_it(device: str, precision: str, offered: bool) -> None:
    run = ("model=behemoth", f"device={device}", f"train.precision={precision}", "train.micro_batch=16")
    peak = plan_of(*run).verdict.estimate.peak_device_bytes or 0
    found = plan_of(*run, f"device.usable_bytes={peak - 1}", "budget.max_recompute_fraction=0").alternatives
    assert found
    assert any("train.precision=bf16_mixed" in alternative.overrides for alternative in found) is offered


def test_changes_are_put_together_only_where_none_does_it_alone() -> None:
    run = ("model=behemoth", "device=a100_40gb", "train.micro_batch=16")
    smallest = plan_of(*run, "ckpt=full", "train.micro_batch=1", "train.grad_accum=16").verdict
    needed = (smallest.estimate.peak_device_bytes or 0) + (smallest.margin_bytes or 0)
    assert not any("ckpt" in a.overrides[0] and "micro" in a.overrides[-1] for a in plan_of(*run).alternatives)
    little = plan_of(*run, f"device.usable_bytes={needed}").alternatives
    assert any({"ckpt=full", "train.micro_batch=1"} <= set(alternative.overrides) for alternative in little)


@pytest.mark.parametrize("run", [TOO_LARGE, TIGHT, LONG, HOPELESS, LLAMA3_LONG, LLAMA3_H100])
def test_a_refusal_takes_few_estimates(run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def counted(spec: TrainSpec) -> MemoryEstimate:
        taken.append(spec)
        return estimate(spec)

    monkeypatch.setattr(planner, "estimate", counted)
    plan_of(*run)
    assert 0 < len(taken) < 150


def test_nothing_that_was_typed_stands_in_the_way_of_an_alternative() -> None:
    typed = ("ckpt=ops", "ckpt.save=[attention,mlp_up]", "ckpt.every=4")
    run = ("model=behemoth", "device=a100_40gb", "train.micro_batch=64", *typed)
    found = plan_of(*run).alternatives
    assert any("ckpt=full" in alternative.overrides for alternative in found)
    for alternative in found:
        assert judge_again(*run, *alternative.overrides) == alternative.verdict


def judge_again(*overrides: str) -> str:
    spec = train_spec(*overrides)
    return judge(spec, estimate(spec), spec.device.usable_bytes).verdict


def test_a_run_that_fits_has_no_alternatives() -> None:
    assert plan_of("model=tiny", "device=a100_40gb").alternatives == ()


def test_a_tight_run_is_offered_only_what_has_room() -> None:
    plan = plan_of(*TIGHT)
    assert plan.verdict.verdict == "tight"
    assert {alternative.verdict for alternative in plan.alternatives} == {"fits"}


def test_nothing_is_offered_where_nothing_fits() -> None:
    plan = plan_of(*HOPELESS)
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
    two_fit = ("model=behemoth", "device=a100_40gb", "train.micro_batch=16")
    seen, named = preflight(run_spec(*two_fit))
    here = seen.model_copy(update={"choices": seen.choices | {"device": "auto"}})

    def offered(gpus: tuple[str, ...]) -> set[str]:
        monkeypatch.setattr(planner, "visible_gpus", lambda: gpus)
        found = planner.plan(here, named.verdict, None).alternatives
        return {word for a in found for word in a.overrides if word.startswith("parallel.")}

    assert offered(("0", "1")) == {"parallel.devices_per_node=2"}
    assert offered(("0",)) == set()


def test_device_hours_stay_unknown_until_a_speed_was_measured() -> None:
    budget = plan_of("model=tiny", "device=a100_40gb").budget
    assert budget.device_hours is None
    assert budget.reason


# The largest micro-batch.


@pytest.mark.parametrize("micro", [1, 4, 64])
def test_the_largest_micro_batch_fits_and_one_more_does_not(micro: int) -> None:
    run = ("model=behemoth", "device=a100_40gb", f"train.micro_batch={micro}")
    largest = plan_of(*run).largest_micro_batch
    assert largest is not None
    assert judge_again(*run, f"train.micro_batch={largest}") == "fits"
    assert judge_again(*run, f"train.micro_batch={largest + 1}") != "fits"


def test_there_is_no_largest_micro_batch_where_not_even_one_fits_or_nobody_can_tell() -> None:
    assert plan_of(*HOPELESS).largest_micro_batch is None
    assert plan_of("model=tiny", "device=a100_40gb", "train.compile=true").largest_micro_batch is None
    assert plan_of("model=tiny", "device=a100_40gb", "device.usable_bytes=null").largest_micro_batch is None


# What checkpointing is worth.


def test_where_all_fits_no_checkpointing_is_needed_and_its_price_is_named() -> None:
    run = ("model=behemoth", "device=a100_40gb")
    found, full = plan_of(*run).checkpointing, plan_of(*run, "ckpt=full").verdict.estimate
    assert found is not None
    assert found.full is not None
    assert found.ops is not None
    none = plan_of(*run).verdict.estimate
    assert found.full.saved_bytes == (none.peak_device_bytes or 0) - (full.peak_device_bytes or 0) > 0
    assert found.full.recompute_flops_fraction == full.recompute_flops_fraction
    assert found.note.startswith("no checkpointing is needed: ckpt=full would save ")
    assert "for +24% FLOPs, ckpt=ops would save " in found.note
    assert found.ops.recompute_flops_fraction < found.full.recompute_flops_fraction


def test_a_run_that_does_not_fit_is_not_told_that_checkpointing_is_not_needed() -> None:
    found = plan_of(*TOO_LARGE).checkpointing
    assert found is not None
    assert found.note.startswith("ckpt=full would save ")


@pytest.mark.parametrize("ckpt", ["none", "full", "selective", "ops"])
def test_a_tiny_model_is_told_that_checkpointing_is_not_worth_it(ckpt: str) -> None:
    plan = plan_of("model=tiny", "device=a100_40gb", "train.micro_batch=1", f"ckpt={ckpt}")
    assert plan.checkpointing is not None
    assert "not worth it at this scale" in plan.checkpointing.note
    assert f"ckpt={'full' if ckpt == 'none' else ckpt}" in plan.checkpointing.note


def test_a_policy_that_takes_more_than_none_is_called_a_regression() -> None:
    spec = run_spec("model=tiny", "device=a100_40gb", "ckpt=full").train
    real = judge(spec, estimate(spec), spec.device.usable_bytes)
    peak = real.estimate.peak_device_bytes or 0

    def with_less(_: TrainSpec) -> Verdict:
        return real.model_copy(
            update={"estimate": real.estimate.model_copy(update={"peak_device_bytes": peak - 28 * 1024**2})}
        )

    found = worth(spec, real, with_less)
    assert found is not None
    assert found.own is not None
    assert found.own.saved_bytes == -28 * 1024**2
    assert found.note.startswith("a regression, not worth it at this scale: ckpt=full takes 28 MiB more for +")
    assert found.note.endswith("Set ckpt=none")


def test_a_policy_that_is_not_needed_is_told_what_none_would_take() -> None:
    found = plan_of("model=behemoth", "device=a100_40gb", "ckpt=full").checkpointing
    assert found is not None
    assert found.note.startswith("ckpt=none fits too, with ")


def test_nobody_says_what_checkpointing_is_worth_where_the_peak_is_unknown() -> None:
    assert plan_of("model=tiny", "device=a100_40gb", "train.compile=true").checkpointing is None
