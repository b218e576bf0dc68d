"""The record of a run: its state from its files alone, and finding it by name."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import ledger
from orchestrator.errors import ConfigError
from orchestrator.project import SOURCE_ROOT
from tests import recorded
from train.report import STEPS_FILE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A planned run."""
    path = tmp_path / "runs" / "tiny-none-b8-t128-20260101-abcd"
    recorded.planned(path)
    return path


def test_a_folder_without_a_submission_is_planned(run_dir: Path) -> None:
    record = ledger.read(run_dir)
    assert (record.state, record.attempt, record.predicted_peak_bytes) == ("planned", 0, recorded.PREDICTED)


def test_a_submission_without_a_watcher_is_submitted_and_lost_after_a_minute(run_dir: Path) -> None:
    recorded.submission(run_dir)
    assert ledger.read(run_dir).state == "submitted"
    recorded.submission(run_dir, submitted_at=time.time() - 61)
    assert ledger.read(run_dir).state == "lost"


def test_a_living_watcher_is_queued_until_it_has_ranks(run_dir: Path) -> None:
    recorded.submission(run_dir)
    recorded.node(run_dir, rank_pids=(), leased=())
    assert ledger.read(run_dir).state == "queued"
    recorded.node(run_dir)
    assert ledger.read(run_dir).state == "running"


def test_a_dead_watcher_without_an_ending_is_lost_though_its_number_was_given_away(run_dir: Path) -> None:
    recorded.submission(run_dir)
    recorded.dead_node(run_dir)
    assert ledger.read(run_dir).state == "lost"


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        ("completed", "completed"),
        ("budget", "budget"),
        ("cancelled", "cancelled"),
        ("rank_failed", "failed"),
        ("out_of_memory", "failed"),
        ("config_error", "failed"),
    ],
)
def test_an_ending_gives_the_state(run_dir: Path, cause: str, state: str) -> None:
    recorded.submission(run_dir)
    recorded.dead_node(run_dir)
    recorded.exit_record(run_dir, cause=cause)
    assert ledger.read(run_dir).state == state


def test_a_further_attempt_hides_the_ending_of_the_one_before(run_dir: Path) -> None:
    recorded.exit_record(run_dir, cause="rank_failed", exit_code=7)
    recorded.train_report(run_dir)
    recorded.submission(run_dir, attempt=2)
    recorded.node(run_dir, attempt=2)
    record = ledger.read(run_dir)
    assert (record.state, record.exit, record.report) == ("running", None, None)


def test_a_run_that_ends_while_it_is_read_is_never_lost(run_dir: Path) -> None:
    recorded.step(run_dir, 1)
    line = (run_dir / STEPS_FILE).read_text()
    (run_dir / STEPS_FILE).write_text(line * 5000)  # so many that reading all of them would leave it time to end
    write_ending = (
        "import os, sys; from pathlib import Path; from tests import recorded; run_dir = Path(sys.argv[1]);"
        "recorded.node(run_dir); print(flush=True); sys.stdin.readline(); recorded.exit_record(run_dir); os._exit(0)"
    )
    for _ in range(4):
        (run_dir / "exit.1.json").unlink(missing_ok=True)
        recorded.submission(run_dir)
        with subprocess.Popen(
            [sys.executable, "-c", write_ending, str(run_dir)],
            cwd=SOURCE_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdin is not None
            watcher.stdout.readline()
            watcher.stdin.close()
            states = [ledger.read(run_dir).state]
            while states[-1] == "running":
                states.append(ledger.read(run_dir).state)
            assert states[-1] == "completed"


def test_the_last_step_is_the_last_complete_line_whatever_a_kill_left_behind_it(run_dir: Path) -> None:
    recorded.step(run_dir, 1)
    whole = recorded.step(run_dir, 2)
    with (run_dir / STEPS_FILE).open("a") as file:
        file.write('{"attempt": 1, "step": 3, "tok')
    assert ledger.read(run_dir).last_step == whole


def test_a_resumed_run_shows_its_own_step_though_an_earlier_attempt_was_further(run_dir: Path) -> None:
    for number in range(1, 10):
        recorded.step(run_dir, number)
    again = recorded.step(run_dir, 5, attempt=2)
    assert ledger.read(run_dir).last_step == again


def test_a_file_without_a_complete_line_has_no_last_step(run_dir: Path) -> None:
    (run_dir / STEPS_FILE).write_text('{"attempt": 1')
    assert ledger.read(run_dir).last_step is None


def test_reading_a_run_takes_as_long_after_many_steps_as_after_a_few(run_dir: Path) -> None:
    recorded.step(run_dir, 1)
    line = (run_dir / STEPS_FILE).read_text()
    (run_dir / STEPS_FILE).write_text(line * 200_000)
    last = recorded.step(run_dir, 2)
    begin = time.process_time()
    assert ledger.read(run_dir).last_step == last
    assert time.process_time() - begin < 0.5  # all lines take seconds


def test_the_measured_peak_is_the_newest_attempts_and_unknown_before_its_first_step(run_dir: Path) -> None:
    recorded.step(run_dir, 1)
    recorded.submission(run_dir)
    assert ledger.read(run_dir).measured_peak_bytes == recorded.MEASURED
    recorded.submission(run_dir, attempt=2)
    assert ledger.read(run_dir).measured_peak_bytes is None


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in this folder \(it has no spec\.json\)") as raised:
        ledger.read(tmp_path)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["spec.json", "plan.json", "submission.json"])
def test_a_file_that_cannot_be_read_is_a_config_error_that_names_it(run_dir: Path, name: str) -> None:
    recorded.submission(run_dir)
    (run_dir / name).write_text('{"half')
    with pytest.raises(ConfigError, match=rf"{run_dir.name}/{name}: it is damaged, or was not written by this version"):
        ledger.read(run_dir)


# Finding runs.


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Three runs, and what else lies in a runs folder."""
    runs = tmp_path / "runs"
    for number, name in enumerate(("tiny-b-wxyz", "tiny-a-abcd", "tiny-a-abce", "tiny-a")):
        recorded.planned(runs / name)
        os.utime(runs / name / "spec.json", (1000 + number, 1000 + number))
    (runs / ".code" / "0123").mkdir(parents=True)
    (runs / "notes.txt").write_text("mine")
    return runs


def test_runs_are_listed_oldest_first(runs_dir: Path) -> None:
    assert [path.name for path in ledger.run_dirs(runs_dir)] == ["tiny-b-wxyz", "tiny-a-abcd", "tiny-a-abce", "tiny-a"]
    assert ledger.run_dirs(runs_dir / "missing") == []


@pytest.mark.parametrize(
    ("typed", "found"), [("tiny-b", "tiny-b-wxyz"), ("tiny-a-abcd", "tiny-a-abcd"), ("tiny-a", "tiny-a")]
)
def test_a_run_is_found_by_a_unique_beginning_and_by_its_whole_name(runs_dir: Path, typed: str, found: str) -> None:
    assert ledger.find(typed, runs_dir).name == found


def test_a_run_is_found_by_its_folder(runs_dir: Path, tmp_path: Path) -> None:
    assert ledger.find(str(runs_dir / "tiny-a-abcd"), tmp_path / "elsewhere").name == "tiny-a-abcd"


def test_an_ambiguous_beginning_names_the_candidates(runs_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match="tiny-a-abc: more than one run begins so: tiny-a-abcd, tiny-a-abce"
    ) as raised:
        ledger.find("tiny-a-abc", runs_dir)
    assert raised.value.exit_code == 2


def test_an_unknown_name_says_where_it_was_sought_and_what_is_there(runs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"huge: there is no such run in .*/runs\. The newest there: .*tiny-a\."):
        ledger.find("huge", runs_dir)
    with pytest.raises(ConfigError, match=r"There are no runs there\."):
        ledger.find("huge", tmp_path / "empty")


def test_the_command_for_a_run_can_be_pasted_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.planned(tmp_path / "runs" / "one")
    recorded.planned(tmp_path / "my runs" / "two")
    monkeypatch.chdir(tmp_path)
    one = ledger.read(tmp_path / "runs" / "one")
    two = ledger.read(tmp_path / "my runs" / "two")
    assert ledger.command("show", one) == "python -m orchestrator show one"
    assert ledger.command("show", two) == f"python -m orchestrator show two --runs-dir '{tmp_path}/my runs'"


def test_a_watcher_on_another_machine_is_taken_to_be_alive(run_dir: Path) -> None:
    recorded.submission(run_dir)
    recorded.node(run_dir, host="elsewhere", pid=1, process_start=0.0)
    assert ledger.read(run_dir).state == "running"


def test_a_record_holds_what_the_files_hold(run_dir: Path) -> None:
    submitted = recorded.submission(run_dir)
    watcher = recorded.dead_node(run_dir)
    ended = recorded.exit_record(run_dir)
    report = recorded.train_report(run_dir)
    record = ledger.read(run_dir)
    assert (record.submission, record.node, record.exit, record.report) == (submitted, watcher, ended, report)
    assert record.plan == json.loads((run_dir / "plan.json").read_text())
    with pytest.raises(dataclasses.FrozenInstanceError, match="state"):
        record.state = "lost"  # type: ignore[misc]
