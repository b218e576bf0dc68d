"""The whole chain in real processes: from the command line to ranks, records, and whatever can end them."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.launch.lease import folder_of, lease
from tests.launched import ENDLESS, Place, done, place, until
from tests.small_disk import fill, small_disk
from tests.test_freeze import files, git
from train.report import STEPS_FILE, read_steps

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    """A place whose processes are all gone after the test."""
    made = place(tmp_path)
    yield made
    until(lambda: not made.processes())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, str]:
    """A run of 6 steps that is over, and what it printed."""
    made = place(tmp_path_factory.mktemp("finished"))
    ended = made.run("checkpoint.every_steps=4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return made, ended.stdout


# A run that ends well.


def test_a_run_leaves_each_record_and_prints_the_predicted_peak_beside_the_measured(
    finished: tuple[Place, str],
) -> None:
    here, printed = finished
    record = here.only()
    names = {path.name for path in record.run_dir.iterdir()}
    expected = {"spec.json", "plan.json", "submission.json", "node.1.json", "exit.1.json", "report.1.json"}
    assert names >= expected | {STEPS_FILE, "checkpoints", "logs", "corpus.json"}
    assert not [name for name in names if name.startswith(".")]
    assert record.state == "completed"
    assert [step.step for step in read_steps(record.run_dir / STEPS_FILE)] == [1, 2, 3, 4, 5, 6]
    assert record.report is not None
    assert record.report.predicted_peak_bytes == record.predicted_peak_bytes
    assert record.report.measured_peak_bytes
    assert "step 6/6  loss" in printed
    assert "Ended after step 6: budget.max_steps=6." in printed
    assert "MiB predicted, " in printed
    assert str(record.run_dir) in printed


def test_the_frozen_source_of_a_run_is_recorded(finished: tuple[Place, str]) -> None:
    here, _ = finished
    record = here.only()
    assert record.submission is not None
    code = Path(record.submission.code)
    assert code.parent == here.runs_dir / ".code"
    assert (code / "train" / "loop.py").exists()
    assert record.submission.dirty == (record.run_dir / "code.patch").exists()
    assert record.submission.command[3:5] == ("model=tiny", "model.num_layers=2")


def test_the_verbs_tell_of_a_finished_run(finished: tuple[Place, str]) -> None:
    here, _ = finished
    name = here.only().name
    (listed,) = json.loads(here.verb("runs", "--json").stdout)
    assert (listed["name"], listed["state"], listed["step"]) == (name, "completed", 6)
    assert listed["predicted_peak_bytes"] > 0
    assert listed["measured_peak_bytes"] > 0
    assert f"{name}  completed  6" in here.verb("runs").stdout
    shown = here.verb("show", name[:-1]).stdout
    assert f"{name}: completed" in shown
    assert "started with    python -m orchestrator model=tiny" in shown
    assert json.loads(here.verb("show", name, "--json").stdout)["report"]["steps"] == 6
    assert "completed after step 6" in here.verb("logs", name).stdout
    waited = here.verb("wait", name)
    assert (waited.returncode, f"{name}: completed" in waited.stdout) == (0, True)
    assert "completed already; nothing to cancel" in here.verb("cancel", name).stdout


def test_a_completed_run_is_resumed_in_a_moved_folder_once_its_limit_is_raised(
    finished: tuple[Place, str], tmp_path: Path
) -> None:
    here, _ = finished
    moved = Place(root=tmp_path, runs_dir=tmp_path / "moved")
    shutil.copytree(here.runs_dir, moved.runs_dir)
    ledger_file = moved.only().run_dir / "submission.json"
    ledger_file.write_text(ledger_file.read_text().replace(str(here.runs_dir), str(tmp_path / "nowhere")))
    name = moved.only().name
    assert "raise the limit that ended it" in moved.verb("resume", name).stdout
    resumed = moved.verb("resume", name, "budget.max_steps=8", f"launch.lease_dir={tmp_path / 'leases'}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    record = moved.only()
    assert (record.state, record.attempt) == ("completed", 2)
    assert "continuing from step-00000006" in moved.verb("logs", name).stdout
    assert [step.attempt for step in read_steps(record.run_dir / STEPS_FILE)] == [1] * 6 + [2] * 2
    assert record.submission is not None
    assert record.submission.code.startswith(str(moved.runs_dir))


def test_one_rank_and_two_make_the_same_losses(here: Place, tmp_path: Path) -> None:
    common = ("budget.max_steps=20", "train.micro_batch=2")
    assert here.run(*common, "train.grad_accum=2").returncode == 0
    assert here.run(*common, "train.grad_accum=1", "parallel.devices_per_node=2").returncode == 0
    one, two = ([step.loss for step in read_steps(r.run_dir / STEPS_FILE)] for r in here.records())
    assert len(one) == 20
    assert one == pytest.approx(two, abs=1e-4)


def test_a_run_in_the_launching_process_is_recorded_like_any_other(here: Place) -> None:
    ended = here.run("launch=inline")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = here.only()
    assert (record.state, record.submission is not None and record.submission.kind) == ("completed", "inline")
    assert "Ended after step 6: budget.max_steps=6." in ended.stdout
    assert "keeps no log" in here.verb("logs", record.name).stdout


# Ranks and watchers that die.


def test_a_killed_rank_is_named_within_seconds_and_the_run_resumes_from_its_last_checkpoint(here: Place) -> None:
    launcher = here.start(ENDLESS, "checkpoint.every_steps=10", "parallel.devices_per_node=2", "train.micro_batch=2")
    record = here.until_step(15)
    assert record.node is not None
    os.kill(record.node.rank_pids[1], signal.SIGKILL)
    killed_at = time.monotonic()
    code, out, _ = done(launcher)
    assert time.monotonic() - killed_at < 10
    assert code == 7
    assert "Rank 1 failed first: killed by SIGKILL." in out
    assert f"continue with   python -m orchestrator resume {record.name}" in out
    until(lambda: not here.processes())  # the watcher's own end comes a moment after its word
    record = here.only()
    assert (record.state, record.exit is not None and record.exit.first_failed_rank) == ("failed", 1)
    assert record.last_step is not None
    last = record.last_step.step
    resumed = here.verb("resume", record.name, f"budget.max_steps={last + 5}", "parallel.devices_per_node=1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "train.grad_accum=2: keeps 4 sequences per optimizer step with 1 rank(s)" in resumed.stdout
    begun = min(step.step for step in read_steps(record.run_dir / STEPS_FILE) if step.attempt == 2)
    assert last - 10 <= begun - 1 <= last
    assert (begun - 1) % 10 == 0
    report = here.only().report
    assert report is not None
    assert report.steps == last + 5


def test_a_killed_watcher_takes_its_ranks_with_it_and_frees_the_machine(here: Place) -> None:
    launcher = here.start(ENDLESS)
    record = here.until_step(1)
    assert record.node is not None
    os.kill(record.node.pid, signal.SIGKILL)
    code, out, _ = done(launcher)
    assert (code, here.only().state) == (7, "lost")
    assert "its watcher was killed, or the machine went down" in out
    until(lambda: not here.processes())
    with lease(["cpu:0", "cpu:1"], 2, folder=folder_of(str(here.root / "leases")), submitted_at=0):
        pass


# Without a terminal, from several shells.


def test_background_runs_queue_and_are_listed_followed_and_cancelled_from_any_shell(here: Place) -> None:
    first = here.run(ENDLESS, "launch.wait=false", "checkpoint.every_steps=1000000")
    assert first.returncode == 0
    running = here.until_step(1).name
    for verb in ("logs -f", "wait", "cancel"):
        assert f"python -m orchestrator {verb} {running}" in first.stdout
    for _ in range(2):
        assert here.run("launch.wait=false").returncode == 0
    waiting, unwanted = (record.name for record in here.records()[1:])
    until(lambda: [record.state for record in here.records()] == ["running", "queued", "queued"])
    shells = [
        here.start_verb("logs", "-f", running),
        here.start_verb("wait", running, waiting),
    ]
    cancelled = here.verb("cancel", unwanted)
    assert cancelled.returncode == 0
    assert "Cancelled while it was queued; no rank was started." in cancelled.stdout
    assert not (here.runs_dir / unwanted / "logs").exists()
    listed = json.loads(here.verb("runs", "--json").stdout)
    assert [run["state"] for run in listed] == ["running", "queued", "cancelled"]
    refused = here.verb("resume", running)
    assert (refused.returncode, f"{running} is running. Cancel it first" in refused.stderr) == (6, True)
    assert here.verb("cancel", running).returncode == 0
    assert here.records()[0].state == "cancelled"
    assert list((here.runs_dir / running / "checkpoints").glob("step-*/.metadata"))
    (logs_code, logs, _), (wait_code, waited, _) = map(done, shells)
    assert (logs_code, wait_code) == (0, 0)
    assert "stopped after step" in logs
    assert f"{running}: cancelled" in waited
    assert f"{waiting}: completed" in waited


def test_a_run_cancelled_before_its_ranks_listen_is_cancelled_and_no_failure(here: Place) -> None:
    assert here.run(ENDLESS, "launch.wait=false").returncode == 0
    until(lambda: here.only().state == "running")
    cancelled = here.verb("cancel", here.only().name)
    assert (cancelled.returncode, here.only().state) == (0, "cancelled"), cancelled.stdout
    assert here.only().exit is not None
    assert "asked to stop" in cancelled.stdout


# Ctrl-C.


@pytest.mark.parametrize("launch", ["local", "inline"])
def test_ctrl_c_stops_with_a_checkpoint_and_leaves_no_process(here: Place, launch: str) -> None:
    launcher = here.start(ENDLESS, f"launch={launch}", "checkpoint.every_steps=1000000")
    record = here.until_step(3)
    os.killpg(launcher.pid, signal.SIGINT)
    code, out, err = done(launcher)
    assert (code, here.only().state) == (0, "cancelled"), out + err
    assert "asked to stop" in out
    assert str(record.run_dir) in out
    assert list((record.run_dir / "checkpoints").glob("step-*/.metadata"))


def test_ctrl_c_right_after_the_start_leaves_neither_a_process_nor_a_run_that_goes_on(here: Place) -> None:
    launcher = here.start(ENDLESS)
    until(lambda: list(here.runs_dir.glob("*/submission.json")))
    os.killpg(launcher.pid, signal.SIGINT)
    code, out, err = done(launcher)
    assert (code, here.only().state) == (0, "cancelled"), out + err
    assert "stopping with a checkpoint" in out


# The code that runs.


def test_the_ranks_run_the_source_as_it_was_when_the_run_was_submitted(here: Place, tmp_path: Path) -> None:
    source = tmp_path / "project"
    for package in ("orchestrator", "train", "conf"):
        shutil.copytree(here.source / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    git(source.parent, "init", "--quiet", str(source))
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "first")
    (source / "train" / "new.py").write_text("new = 1\n")
    copied = Place(root=tmp_path, runs_dir=here.runs_dir, source=source)
    with lease(["cpu:0", "cpu:1"], 2, folder=folder_of(str(tmp_path / "leases")), submitted_at=0):
        assert copied.run("launch.wait=false").returncode == 0
        until(lambda: copied.only().state == "queued")
        for name in ("train/loop.py", "orchestrator/launch/worker.py", "orchestrator/launch/cause.py"):
            (source / name).write_text("raise SystemExit('broken after the launch')\n")
    waited = here.verb("wait", copied.only().name)
    assert waited.returncode == 0, waited.stdout
    record = copied.only()
    assert record.submission is not None
    assert (record.submission.commit, record.submission.dirty) == (git(source, "rev-parse", "HEAD").strip(), True)
    git(source, "worktree", "add", "--quiet", "--detach", str(tmp_path / "again"))
    git(tmp_path / "again", "apply", str(record.run_dir / "code.patch"))
    ran = {name: text for name, text in files(Path(record.submission.code)).items() if "__pycache__" not in name}
    assert ran == files(tmp_path / "again")


# Disks.


@pytest.mark.parametrize("leave_bytes", [0, 200_000])
def test_a_disk_that_fills_up_ends_a_run_with_a_reason_and_it_resumes_when_there_is_room(
    here: Place, leave_bytes: int
) -> None:
    with small_disk(here.runs_dir, 16 << 20):
        launcher = here.start(ENDLESS, "checkpoint.every_steps=20", "checkpoint.keep=1")
        until(lambda: list(here.runs_dir.glob("*/checkpoints/step-*/.metadata")))
        filler = fill(here.runs_dir, leave_bytes)
        code, out, err = done(launcher)
        assert code == 7, out + err
        assert "Free space there" in out
        record = here.only()
        assert record.state == "failed"
        (kept,) = (record.run_dir / "checkpoints").glob("step-*")
        assert (kept / ".metadata").exists()
        filler.unlink()
        step = int(kept.name.removeprefix("step-"))
        resumed = here.verb("resume", record.name, f"budget.max_steps={step + 25}")
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert f"continuing from {kept.name}" in here.verb("logs", record.name).stdout
        until(lambda: not here.processes())
