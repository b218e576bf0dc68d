"""Run folders: names that nobody else has, and refusals that leave nothing behind."""

import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import NotSubmittedError
from orchestrator.launch import folder
from orchestrator.spec import RunSpec
from tests import recorded
from tests.small_disk import fill, read_only_disk, small_disk
from tests.specs import run_spec
from train import shapes

FORK = multiprocessing.get_context("fork")
MIB = 1 << 20


def spec_in(runs_dir: Path, *overrides: str) -> RunSpec:
    return run_spec("model=tiny", "train.micro_batch=4", "train.seq_len=128", f"launch.runs_dir={runs_dir}", *overrides)


def claim_some(spec: RunSpec, count: int, said: Path) -> None:
    for _ in range(count):
        claimed, run_dir = folder.claim(spec)
        assert claimed.name == run_dir.name
        with said.open("a") as file:
            file.write(f"{run_dir.name}\n")


def test_a_run_is_named_for_what_it_is_the_day_and_four_letters(tmp_path: Path) -> None:
    claimed, run_dir = folder.claim(spec_in(tmp_path / "runs"))
    assert re.fullmatch(rf"tiny-none-b4-t128-{time.strftime('%Y%m%d')}-[a-z]{{4}}", claimed.name)
    assert run_dir == tmp_path / "runs" / claimed.name
    assert run_dir.is_dir()


def test_no_two_of_many_launches_at_once_get_one_name(tmp_path: Path) -> None:
    said = tmp_path / "said"
    args = (spec_in(tmp_path / "runs"), 10, said)
    workers = [FORK.Process(target=claim_some, args=args) for _ in range(30)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    names = said.read_text().split()
    assert [worker.exitcode for worker in workers] == [0] * 30
    assert len(set(names)) == len(names) == 300


def test_a_home_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = spec_in(tmp_path)
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"runs_dir": "~/mine"})})
    assert folder.claim(spec)[1].parent == tmp_path / "mine"


# What cannot be written.


def test_a_runs_folder_that_cannot_be_written_is_refused_with_its_key(tmp_path: Path) -> None:
    with (
        read_only_disk(tmp_path / "disk") as disk,
        pytest.raises(
            NotSubmittedError,
            match=r"launch\.runs_dir: .*/disk/runs cannot be written \(Read-only file system\)\. Nothing was started\.",
        ) as raised,
    ):
        folder.claim(spec_in(disk / "runs"))
    assert raised.value.exit_code == 6


def test_a_runs_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for runs_dir, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "runs", "Not a directory")):
        with pytest.raises(NotSubmittedError, match=rf"launch\.runs_dir: .* cannot be written \({why}\)"):
            folder.claim(spec_in(runs_dir))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_plan_that_finds_no_room_is_refused_and_no_half_written_file_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        spec, run_dir = folder.claim(spec_in(disk / "runs"))
        fill(disk)
        with pytest.raises(NotSubmittedError, match=r"launch\.runs_dir: .* cannot be written \(No space left"):
            folder.write_plan(run_dir, spec, {"estimate": {}})
        assert list(run_dir.iterdir()) == []


# A further attempt must not cost what the earlier ones left.


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A run of one attempt, with a checkpoint, set aside for another one."""
    run_dir = tmp_path / "runs" / "one"
    recorded.planned(run_dir)
    recorded.submission(run_dir)
    recorded.exit_record(run_dir, cause="cancelled")
    (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
    return run_dir


def test_what_an_attempt_was_started_with_is_kept_beside_what_the_next_one_is(resumed: Path) -> None:
    before = (resumed / "spec.json").read_text()
    folder.set_aside(resumed, 1)
    folder.write_plan(resumed, spec_in(resumed.parent, "budget.max_steps=9"), {"estimate": {}})
    assert (resumed / "spec.1.json").read_text() == before
    assert (resumed / "spec.json").read_text() != before
    assert {path.name for path in resumed.glob("*.1.json")} >= {"spec.1.json", "plan.1.json", "submission.1.json"}


def test_a_resume_that_could_not_be_started_leaves_the_run_as_it_was(resumed: Path) -> None:
    before = {path.name: path.read_text() for path in resumed.glob("*.json")}
    folder.set_aside(resumed, 1)
    folder.write_plan(resumed, spec_in(resumed.parent, "budget.max_steps=9"), {"estimate": {}})
    recorded.submission(resumed, attempt=2)
    folder.undo(resumed, attempt=2)
    assert {path.name: path.read_text() for path in resumed.glob("*.json")} == before
    assert (resumed / "checkpoints" / "step-00000003").is_dir()


def test_a_run_that_could_not_be_started_leaves_nothing(tmp_path: Path) -> None:
    recorded.planned(tmp_path / "runs" / "one")
    folder.undo(tmp_path / "runs" / "one", attempt=1)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_disk_at_a_resume_costs_no_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        run_dir = disk / "runs" / "one"
        spec = recorded.planned(run_dir)
        recorded.submission(run_dir)
        (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
        before = {path.name: path.read_text() for path in run_dir.glob("*.json")}
        fill(disk)
        with pytest.raises(NotSubmittedError, match="No space left"):
            folder.set_aside(run_dir, 1)
        with pytest.raises(NotSubmittedError, match="No space left"):
            folder.write_plan(run_dir, spec, {"estimate": {}})
        folder.undo(run_dir, attempt=2)
        assert {path.name: path.read_text() for path in run_dir.glob("*.json")} == before
        assert (run_dir / "checkpoints" / "step-00000003").is_dir()


# Room for checkpoints.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MiB."""
    with small_disk(tmp_path / "disk", 20 * MIB) as mounted:
        yield mounted


def test_a_checkpoint_is_the_parameters_and_two_moments_of_each(tmp_path: Path) -> None:
    spec = spec_in(tmp_path).train
    assert folder.checkpoint_bytes(spec) == 3 * 4 * shapes.num_parameters(spec.model)
    half = spec_in(tmp_path, "train.precision=bf16").train
    assert folder.checkpoint_bytes(half) == 3 * 2 * shapes.num_parameters(spec.model)


def test_a_run_whose_checkpoints_find_no_room_is_refused_with_the_numbers_and_the_keys(disk: Path) -> None:
    spec = spec_in(disk / "runs")
    size = folder.checkpoint_bytes(spec.train) / MIB
    expected = (
        rf"launch\.runs_dir={disk}/runs: 20\.0 MiB free, and this run's checkpoints take {3 * size:.1f} MiB "
        rf"\({size:.1f} MiB each, checkpoint\.keep=2 and one being written\)\. "
        r"Set launch\.runs_dir to a disk with more room, or lower checkpoint\.keep\."
    )
    with pytest.raises(NotSubmittedError, match=expected) as raised:
        folder.check_space(spec)
    assert raised.value.exit_code == 6
    assert list(disk.iterdir()) == []


def test_a_run_whose_checkpoints_find_room_passes(disk: Path) -> None:
    folder.check_space(spec_in(disk / "runs", "model.num_layers=1", "checkpoint.keep=1"))


def test_the_checkpoints_that_a_resumed_run_has_already_need_no_more_room(disk: Path) -> None:
    spec = spec_in(disk / "runs", "checkpoint.keep=1")
    size = folder.checkpoint_bytes(spec.train)
    run_dir = disk / "runs" / "one"
    kept = run_dir / "checkpoints" / "step-00000003"
    kept.mkdir(parents=True)
    (kept / "data").write_bytes(b"\0" * size)
    (kept / ".metadata").touch()
    assert size < 20 * MIB - size < 2 * size
    folder.check_space(spec, run_dir)
    fill(disk, leave_bytes=size // 2)
    with pytest.raises(NotSubmittedError, match=r"this run's checkpoints take"):
        folder.check_space(spec, run_dir)


def test_a_runs_folder_that_is_below_a_file_is_refused_when_its_room_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder.check_space(spec_in(tmp_path / "file" / "runs"))  # the disk has room; claiming the folder is refused
