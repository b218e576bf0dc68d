"""Rows of finished runs, their errors, and what a verdict's margin is read from."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator import accuracy, ledger
from orchestrator.accuracy import Row
from orchestrator.launch.cause import RankEnd, cause_of
from tests import recorded
from tests.launched import place

GIB = 1024**3


def row(predicted: int | None, measured: int | None, **changes: Any) -> Row:
    known = {
        "run": "a",
        "attempt": 1,
        "method": "formula",
        "device_kind": "cpu",
        "policy": "none",
        "verdict": "unknown" if predicted is None else "fits",
        "usable_bytes": 1000,
        "predicted_bytes": predicted,
        "tensors_bytes": predicted,
        "measured_bytes": measured,
        "out_of_memory": False,
    }
    return Row.model_validate(known | changes)


def ended(
    runs_dir: Path,
    name: str,
    *overrides: str,
    verdict: str = "fits",
    predicted: int | None = 2 * GIB,
    measured: int | None = 2 * GIB,
    plan: str = "plan.json",
    attempt: int = 1,
    **report: Any,
) -> Path:
    """A run folder with a whole plan and, where something was measured, a report."""
    run_dir = runs_dir / name
    if not run_dir.exists():
        recorded.planned(run_dir, *overrides)
        recorded.submission(run_dir)
    terms = {"activations": GIB // 2, "context": GIB // 8, "nccl": 0, "workspace": GIB // 8}
    estimate = {"method": "formula", "peak_device_bytes": predicted, "terms": terms if predicted else {}}
    content = {"verdict": verdict, "device": {"usable_bytes": 4 * GIB}, "estimate": estimate}
    (run_dir / plan).write_text(json.dumps(content), encoding="utf-8")
    if measured is not None:
        recorded.train_report(run_dir, attempt, measured_peak_bytes=measured, **report)
        recorded.exit_record(run_dir, attempt)
    return run_dir


def test_a_finished_run_is_a_row_with_what_was_predicted_judged_and_measured(tmp_path: Path) -> None:
    ended(tmp_path, "one", "ckpt=full", predicted=3 * GIB, measured=2 * GIB)
    (found,) = accuracy.read(tmp_path)
    assert (found.method, found.device_kind, found.policy, found.verdict) == ("formula", "cpu", "full", "fits")
    assert (found.predicted_bytes, found.measured_bytes, found.usable_bytes) == (3 * GIB, 2 * GIB, 4 * GIB)
    assert found.tensors_bytes == 3 * GIB - GIB // 4
    assert found.error == pytest.approx(0.5)


def test_a_plan_without_the_terms_of_its_peak_has_an_error_and_no_share_in_a_margin(tmp_path: Path) -> None:
    plan = ended(tmp_path, "older", predicted=3 * GIB, measured=2 * GIB) / "plan.json"
    content = json.loads(plan.read_text(encoding="utf-8"))
    del content["estimate"]["terms"]
    plan.write_text(json.dumps(content), encoding="utf-8")
    (found,) = accuracy.read(tmp_path)
    assert found.error == pytest.approx(0.5)
    assert found.tensors_bytes is None
    assert accuracy.misses([found], "formula", "cpu").rows == ()


def test_each_attempt_is_a_row_with_the_plan_it_was_started_with(tmp_path: Path) -> None:
    run_dir = ended(tmp_path, "one", predicted=1 * GIB, measured=2 * GIB, plan="plan.1.json")
    ended(tmp_path, "one", predicted=3 * GIB, measured=4 * GIB, attempt=2, steps=9)
    assert sorted(path.name for path in run_dir.glob("plan*")) == ["plan.1.json", "plan.json"]
    assert [(r.attempt, r.predicted_bytes, r.measured_bytes) for r in accuracy.read(tmp_path)] == [
        (1, 1 * GIB, 2 * GIB),
        (2, 3 * GIB, 4 * GIB),
    ]


def test_what_was_not_measured_to_its_steady_state_is_no_row(tmp_path: Path) -> None:
    ended(tmp_path, "running", measured=None)
    ended(tmp_path, "one-step", steps=1)
    ended(tmp_path, "resumed-to-its-end", attempt=2, first_loss=None)
    recorded.train_report(ended(tmp_path, "not-told"), measured_peak_bytes=None)
    assert accuracy.read(tmp_path) == ()
    assert accuracy.read(tmp_path / "nowhere") == ()


def test_a_damaged_run_and_what_is_no_run_are_passed_over(tmp_path: Path) -> None:
    ended(tmp_path, "good")
    (ended(tmp_path, "damaged") / "plan.json").write_text("{", encoding="utf-8")
    (ended(tmp_path, "older") / "plan.json").write_text('{"estimate": {}}', encoding="utf-8")
    (tmp_path / ".data").mkdir()
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert [found.run for found in accuracy.read(tmp_path)] == ["good"]


def test_only_the_newest_runs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "NEWEST_RUNS", 3)
    for number, name in enumerate("dcbae"):
        os.utime(ended(tmp_path, name) / "spec.json", (1000 + number, 1000 + number))
    assert [one.run for one in accuracy.read(tmp_path)] == ["b", "a", "e"]


def test_a_cpu_rank_that_the_kernel_killed_ended_out_of_memory(tmp_path: Path) -> None:
    run_dir = ended(tmp_path, "one", measured=None)
    end = RankEnd(rank=0, returncode=-9, time=1.0, killed_by_us=False)
    ledger.write(run_dir / "exit.1.json", cause_of(run_dir, 1, [end]))
    (found,) = accuracy.read(tmp_path)
    assert (found.out_of_memory, found.measured_bytes, found.false_accept) == (True, None, True)


def test_a_rank_that_failed_otherwise_or_was_killed_by_us_is_no_row(tmp_path: Path) -> None:
    run_dir = ended(tmp_path, "one", measured=None)
    for returncode, by_us in ((1, False), (-15, False), (-9, True)):
        end = RankEnd(rank=0, returncode=returncode, time=1.0, killed_by_us=by_us)
        ledger.write(run_dir / "exit.1.json", cause_of(run_dir, 1, [end]))
        assert accuracy.read(tmp_path) == ()


@pytest.mark.parametrize(
    ("verdict", "measured", "out_of_memory", "false_accept", "false_refusal"),
    [
        ("fits", 1000, False, False, False),
        ("fits", 1001, False, True, False),
        ("tight", 1001, False, True, False),
        ("tight", None, True, True, False),
        ("does_not_fit", 1000, False, False, True),
        ("does_not_fit", 1001, False, False, False),
        ("does_not_fit", None, True, False, False),
        ("unknown", 1001, False, False, False),
    ],
)
def test_a_verdict_is_false_where_the_run_showed_otherwise(
    verdict: str, measured: int | None, out_of_memory: bool, false_accept: bool, false_refusal: bool
) -> None:
    found = row(900, measured, verdict=verdict, out_of_memory=out_of_memory)
    assert (found.false_accept, found.false_refusal) == (false_accept, false_refusal)


def test_errors_are_ranked_by_absolute_value_and_keep_their_sign() -> None:
    """Of 20 rows the 95th percentile is the nineteenth."""
    predicted = [100 + error for error in (*range(1, 19), -20, -30)]
    (group,) = accuracy.groups([row(each, 100) for each in predicted])
    assert group.runs == 20
    assert group.p95_error == pytest.approx(-0.20)
    assert group.worst_error == pytest.approx(-0.30)
    assert group.median_absolute_error == pytest.approx(0.105)
    assert group.bias == pytest.approx(0.085)


def test_errors_to_both_sides_do_not_hide_each_other_in_the_median() -> None:
    (group,) = accuracy.groups([row(110, 100), row(90, 100)])
    assert group.median_absolute_error == pytest.approx(0.1)
    assert group.bias == pytest.approx(0.0)


def test_rows_are_grouped_by_method_device_kind_and_policy() -> None:
    rows = [row(1, 1), row(1, 1, policy="full"), row(1, 1, device_kind="cuda"), row(1, 1, method="trace")]
    found = [(group.method, group.device_kind, group.policy, group.runs) for group in accuracy.groups(rows)]
    assert found == [
        ("formula", "cpu", "full", 1),
        ("formula", "cpu", "none", 1),
        ("formula", "cuda", "none", 1),
        ("trace", "cpu", "none", 1),
    ]


def test_a_run_that_nobody_predicted_is_counted_by_itself_and_never_as_a_success() -> None:
    (group,) = accuracy.groups([row(None, 100), row(100, 100)])
    assert (group.runs, group.no_prediction) == (1, 1)
    (alone,) = accuracy.groups([row(None, 100)])
    assert (alone.runs, alone.no_prediction, alone.worst_error) == (0, 1, None)
    assert (alone.median_absolute_error, alone.bias) == (None, None)
    assert accuracy.misses([row(None, 100)], "formula", "cpu").rows == ()


def test_misses_are_shares_of_the_tensors_of_one_method_and_kind_over_all_policies() -> None:
    rows = [
        row(100, 104, tensors_bytes=50),
        row(100, 108, policy="full"),
        row(200, 100),
        row(100, 190, device_kind="cuda"),
        row(100, 195, method="trace"),
        row(100, None, out_of_memory=True),
        row(100, None, out_of_memory=True, verdict="does_not_fit"),
    ]
    found = accuracy.misses(rows, "formula", "cpu")
    assert [each.tensors_bytes for each in found.rows] == [50, 100, 200]
    assert [each.share for each in found.rows] == pytest.approx([0.08, 0.08, -0.5])
    assert found.out_of_memory == 1


@pytest.mark.slow
def test_a_run_that_was_started_against_its_verdict_and_did_fit_is_a_false_refusal(tmp_path: Path) -> None:
    here = place(tmp_path)
    too_much = ("device.context_bytes=8000000000", "device.usable_bytes=7000000000")
    assert here.run(*too_much).returncode == 3
    done = here.run(*too_much, "oomguard.enforce=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "oomguard.enforce=false: goes on in spite of the verdict (does not fit: " in done.stderr
    (found,) = accuracy.read(here.runs_dir)
    assert (found.verdict, found.false_refusal) == ("does_not_fit", True)
    group = json.loads(here.verb("accuracy", "--json").stdout)["groups"][0]
    assert (group["runs"], group["false_accepts"], group["false_refusals"]) == (1, 0, 1)
