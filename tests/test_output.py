"""The JSON contract and the text of a plan."""

import json
from pathlib import Path

import pytest

from orchestrator import planner
from orchestrator.output import as_json, as_text
from orchestrator.preflight import judge, verdict_code
from tests.specs import run_spec

GOLDEN = Path(__file__).parent / "golden"
TOO_LARGE = ("model=behemoth", "ckpt=none", "device=a100_40gb", "train.micro_batch=64")


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "visible_gpus", lambda: ())


def test_the_json_of_a_refusal_is_as_it_was(request: pytest.FixtureRequest) -> None:
    text = json.dumps(as_json(*judge(run_spec(*TOO_LARGE))), indent=2) + "\n"
    golden = GOLDEN / "refusal.json"
    if request.config.getoption("--renew-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_the_text_of_a_refusal_is_as_it_was(request: pytest.FixtureRequest) -> None:
    text = as_text(*judge(run_spec(*TOO_LARGE))) + "\n"
    golden = GOLDEN / "refusal.txt"
    if request.config.getoption("--renew-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_the_json_holds_every_key_of_the_contract() -> None:
    content = as_json(*judge(run_spec("model=behemoth", "device=h100_80gb")))
    assert {"choices", "verdict", "reason", "device", "estimate", "alternatives", "budget"} <= set(content)
    assert {"name", "usable_bytes"} <= set(content["device"])
    assert {
        "method",
        "peak_phase",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_device_bytes",
        "phases",
        "first_step_peak_allocated_bytes",
        "terms",
        "margin_bytes",
        "margin_source",
        "recompute_flops_fraction",
    } <= set(content["estimate"])
    assert set(content["estimate"]["phases"]) == {"init", "forward", "backward", "optimizer_step", "resume"}
    assert "device_hours" in content["budget"]
    assert {"note", "full", "ops", "own"} <= set(content["checkpointing"])
    assert {"saved_bytes", "recompute_flops_fraction"} <= set(content["checkpointing"]["full"])
    assert content["largest_micro_batch"] >= 4
    assert json.loads(json.dumps(content)) == content


def test_numbers_that_nobody_can_know_are_null_with_the_reason_beside_them() -> None:
    content = as_json(*judge(run_spec("train.compile=true", "device=h100_80gb")))
    assert content["verdict"] == "unknown"
    assert content["estimate"]["peak_device_bytes"] is None
    assert content["estimate"]["margin_bytes"] is None
    assert content["estimate"]["margin_source"] is None
    assert content["largest_micro_batch"] is None
    assert content["checkpointing"] is None
    assert content["estimate"]["unknown"][0]["key"] == "train.compile"
    assert "train.compile=true" in content["reason"]


def test_an_unknown_plan_says_how_to_run_all_the_same() -> None:
    text = as_text(*judge(run_spec("train.compile=true", "device=h100_80gb")))
    assert "oomguard.allow_unknown=true" in text
    assert "Set it to false" in text


def test_where_nothing_fits_the_text_says_so() -> None:
    text = as_text(*judge(run_spec("model=llama3_405b", "device=rtx_3090", "train.precision=bf16_mixed")))
    tried = "recomputing all blocks, micro-batches of 1 and more devices"
    assert f"nothing was found that fits: tried {tried}, within the budget and at the tokens of a step. " in text


def test_where_nothing_fits_the_loss_in_chunks_is_named_if_it_was_tried() -> None:
    long = ("model=llama3_8b", "device=rtx_3090", "train.precision=bf16_mixed", "train.micro_batch=1")
    text = as_text(*judge(run_spec(*long, "train.seq_len=32768", "parallel=node_8")))
    assert "nothing was found that fits: tried recomputing all blocks and the loss in chunks, within the budget" in text


def test_where_there_is_nothing_to_try_the_text_says_only_that_nothing_fits() -> None:
    last = ("ckpt=full", "train.micro_batch=1", "train.loss=chunked", "train.precision=bf16_mixed")
    text = as_text(*judge(run_spec("model=llama3_405b", "device=cpu", "device.usable_bytes=1000", *last)))
    assert "nothing was found that fits within the budget and at the tokens of a step. Set more devices" in text


def test_a_tight_run_is_warned_and_offered_room() -> None:
    text = as_text(*judge(run_spec("model=behemoth", "device=a100_40gb", "train.micro_batch=15")))
    assert "tight: " in text
    assert "more room with ckpt=" in text
    assert "documented bound" in text


def test_the_text_says_how_far_the_micro_batch_may_grow_and_what_checkpointing_would_save() -> None:
    seen, plan = judge(run_spec("model=behemoth", "device=a100_40gb"))
    text = as_text(seen, plan)
    assert f"up to train.micro_batch={plan.largest_micro_batch} fits with its margin" in text
    assert "no checkpointing is needed: ckpt=full would save " in text


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("train.compile=true", "oomguard.allow_unknown=true"), "oomguard.allow_unknown=true"),
        (("train.compile=true", "oomguard.enforce=false"), "oomguard.enforce=false"),
        ((*TOO_LARGE, "oomguard.enforce=false"), "oomguard.enforce=false"),
    ],
)
def test_a_run_that_starts_against_its_verdict_says_by_which_setting(overrides: tuple[str, ...], setting: str) -> None:
    seen, plan = judge(run_spec("device=a100_40gb", *overrides))
    assert plan.verdict.verdict in ("unknown", "does_not_fit")
    assert f"starts all the same, by {setting}" in as_text(seen, plan)
    assert verdict_code(seen, plan) == 0
