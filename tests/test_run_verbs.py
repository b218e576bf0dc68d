"""The verbs that take run names, on recorded folders."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import psutil
import pytest

from orchestrator import cli
from orchestrator.units import MIB
from tests import recorded


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A completed, a failed and a planned run."""
    runs = tmp_path / "runs"
    for number, name in enumerate(("done-aaaa", "broken-bbbb", "planned-cccc")):
        recorded.planned(runs / name)
        os.utime(runs / name / "spec.json", (1000 + number, 1000 + number))
    for name in ("done-aaaa", "broken-bbbb"):
        recorded.submission(runs / name, command=("python", "-m", "orchestrator", "data.path=my text"))
        recorded.dead_node(runs / name)
    recorded.exit_record(runs / "done-aaaa")
    recorded.train_report(runs / "done-aaaa")
    recorded.step(runs / "done-aaaa", 3)
    recorded.exit_record(runs / "broken-bbbb", cause="rank_failed", exit_code=7, detail="Rank 0 failed first: x")
    return runs


def verb(capsys: pytest.CaptureFixture[str], runs_dir: Path, *words: str) -> tuple[int, str, str]:
    code = cli.main([*words, "--runs-dir", str(runs_dir)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_runs_lists_names_whole_with_state_step_loss_and_both_peaks(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = verb(capsys, runs_dir, "runs")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows[1] == ["done-aaaa", "completed", "3", "2.000", "3.00", "GiB", "2.00", "GiB"]
    assert rows[2] == ["broken-bbbb", "failed", "3.00", "GiB", "unknown"]
    assert rows[3][:2] == ["planned-cccc", "planned"]


def test_runs_as_json_has_null_for_what_nobody_knows(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = verb(capsys, runs_dir, "runs", "--json")
    done, broken, _ = json.loads(out)
    assert (done["state"], done["step"], done["measured_peak_bytes"]) == ("completed", 3, recorded.MEASURED)
    assert (broken["step"], broken["loss"], broken["measured_peak_bytes"]) == (None, None, None)


def test_an_empty_folder_has_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(capsys, tmp_path, "runs")[1] == f"no runs in {tmp_path}\n"
    assert verb(capsys, tmp_path, "runs", "--json")[1] == "[]\n"


def test_a_damaged_run_is_named_and_does_not_hide_the_others(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs_dir / "broken-bbbb" / "submission.json").write_text("{")
    code, out, err = verb(capsys, runs_dir, "runs")
    assert code == 2
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["done-aaaa", "planned-cccc"]
    assert err.startswith(f"{runs_dir}/broken-bbbb/submission.json: it is damaged")


def test_show_prints_a_command_that_can_be_pasted(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = verb(capsys, runs_dir, "show", "done")
    line = next(line for line in out.splitlines() if "started with" in line)
    assert shlex.split(line)[2:] == ["python", "-m", "orchestrator", "data.path=my text"]
    assert "a dirty tree on commit c0ffee" in out


def test_logs_refuses_a_rank_that_the_run_does_not_have(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = verb(capsys, runs_dir, "logs", "done", "--rank", "3")
    assert (code, err) == (2, "--rank=3: done-aaaa has ranks 0 to 0. Set it to one of them or all.\n")
    recorded.rank_log(runs_dir / "done-aaaa", 0, "hello\n")
    assert verb(capsys, runs_dir, "logs", "done", "--rank", "all")[1] == "hello\n"


def test_wait_exits_as_the_worst_of_its_runs_did(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verb(capsys, runs_dir, "wait", "done", "broken")
    assert code == 7
    assert "done-aaaa: completed" in out
    assert "broken-bbbb: failed" in out


def test_there_is_nothing_to_cancel_in_a_run_that_is_over_or_never_began(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = verb(capsys, runs_dir, "cancel", "done", "planned")
    assert (code, out.splitlines()) == (
        0,
        [
            "done-aaaa: completed already; nothing to cancel",
            "planned-cccc: it was never started; nothing to cancel",
        ],
    )


def test_a_mistyped_name_among_several_cancels_none(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    (runs_dir / "broken-bbbb" / "exit.1.json").unlink()
    started = psutil.Process(bystander.pid).create_time()
    recorded.node(runs_dir / "broken-bbbb", pid=bystander.pid, process_start=started)
    code, _, err = verb(capsys, runs_dir, "cancel", "broken", "dnoe")
    assert (code, err.partition(":")[0]) == (2, "dnoe")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_missing_name_is_a_config_error_that_points_to_the_help(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = verb(capsys, runs_dir, "show")
    assert code == 2
    assert "python -m orchestrator show --help" in err


def test_accuracy_lists_errors_and_false_verdicts_by_method_device_and_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (measured, verdict) in enumerate([(90, "fits"), (100, "fits"), (125, "does_not_fit"), (600, "tight")]):
        run_dir = tmp_path / f"run-{number}"
        recorded.planned(run_dir)
        recorded.submission(run_dir)
        plan = {
            "verdict": verdict,
            "device": {"usable_bytes": 500},
            "estimate": {"method": "formula", "peak_device_bytes": 100, "terms": {"activations": 50, "context": 50}},
        }
        (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        recorded.train_report(run_dir, measured_peak_bytes=measured)
    code, out, _ = verb(capsys, tmp_path, "accuracy")
    assert code == 0
    header, line, margin = out.splitlines()
    assert header.split()[:9] == ["method", "device", "ckpt", "runs", "median", "abs", "p95", "worst", "bias"]
    assert line.split() == ["formula", "cpu", "none", "4", "15.6%", "-83.3%", "-83.3%", "-10.0%", "1", "1", "0"]
    assert margin == (
        "margin of formula on cpu: the documented bound (4 of 20 runs); largest under-prediction 1000.0% of the tensors"
    )
    _, out, _ = verb(capsys, tmp_path, "accuracy", "--json")
    found = json.loads(out)
    (group,) = found["groups"]
    assert (group["runs"], group["false_accepts"], group["false_refusals"], group["no_prediction"]) == (4, 1, 1, 0)
    assert group["worst_error"] == pytest.approx(100 / 600 - 1)
    assert group["median_absolute_error"] == pytest.approx((0.2 + 1 / 9) / 2)
    assert group["bias"] == pytest.approx(-0.1)
    assert found["margins"] == [
        {
            "method": "formula",
            "device_kind": "cpu",
            "runs": 4,
            "largest_under_prediction": 10.0,
            "out_of_memory": 0,
            "measured_up_to_bytes": None,
        }
    ]


def test_accuracy_says_up_to_which_size_the_margin_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        run_dir = tmp_path / f"run-{number}"
        recorded.planned(run_dir)
        estimate = {"method": "formula", "peak_device_bytes": 100 * MIB, "terms": {"activations": 99 * MIB}}
        plan = {"verdict": "fits", "device": {"usable_bytes": 500 * MIB}, "estimate": estimate}
        (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        recorded.train_report(run_dir, measured_peak_bytes=101 * MIB)
    _, out, _ = verb(capsys, tmp_path, "accuracy")
    assert out.splitlines()[-1] == (
        "margin of formula on cpu: from these 20 runs for up to 400 MiB of tensors, the documented bound above; "
        "largest under-prediction 1.0% of the tensors"
    )
    (margin,) = json.loads(verb(capsys, tmp_path, "accuracy", "--json")[1])["margins"]
    assert margin["measured_up_to_bytes"] == 400 * MIB


def test_accuracy_of_no_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(capsys, tmp_path, "accuracy")[:2] == (0, f"no measured runs in {tmp_path}\n")
    assert json.loads(verb(capsys, tmp_path, "accuracy", "--json")[1]) == {"groups": [], "margins": []}
