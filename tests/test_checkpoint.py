"""Checkpoints: a resume goes on as if nothing had happened, and no failure costs more than the save it hit."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_run import log, one_rank, small_spec, train_here, train_ranks
from train import checkpoint
from train.checkpoint import CheckpointError
from train.report import STEPS_FILE, StepReport, read_report, read_steps
from train.spec import TrainSpec

STEPS = 8
TWELVE = ("train.seq_len=32", f"budget.max_steps={STEPS}", "checkpoint.every_steps=4", "train.eval.every_steps=4")
"""Twelve sequences a step, whoever takes them; a checkpoint after step 4 and one at the end."""
PLANS = {
    "one": ("parallel.devices_per_node=1", "train.micro_batch=12", "train.grad_accum=1"),
    "one, accumulating": ("parallel.devices_per_node=1", "train.micro_batch=4", "train.grad_accum=3"),
    "two": ("parallel.devices_per_node=2", "train.micro_batch=6", "train.grad_accum=1"),
    "two, accumulating": ("parallel.devices_per_node=2", "train.micro_batch=3", "train.grad_accum=2"),
    "three": ("parallel.devices_per_node=3", "train.micro_batch=4", "train.grad_accum=1"),
}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Path]:
    """Run folders of uninterrupted runs, by plan; of two ranks and of one."""
    done = {name: folder / name for name in ("one", "two")}
    for name, run_dir in done.items():
        assert set(train_ranks(plan(folder, name), run_dir)) == {0}, log(run_dir)
    return done


def plan(folder: Path, name: str) -> TrainSpec:
    return small_spec(folder, *TWELVE, *PLANS[name])


def cut(whole: Path, to: Path) -> Path:
    """A copy of a run folder as it was after step 4."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS:08d}")
    return to


def steps(run_dir: Path) -> list[StepReport]:
    return read_steps(run_dir / STEPS_FILE)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / checkpoint.FOLDER).iterdir() if path.is_dir())


def stopping_after(step: int) -> dict[str, object]:
    """Arguments that ask a run to stop after this many steps of its attempt."""
    calls = iter(range(1, step + 1))
    return {"stop_requested": lambda: next(calls) == step}


# Resuming.


def _learned(step: StepReport) -> tuple[object, ...]:
    return step.step, step.tokens, step.loss, step.lr, step.grad_norm, step.eval_loss


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_resume_on_one_rank_is_bit_identical(after: int, tmp_path: Path, whole: dict[str, Path]) -> None:
    spec = plan(whole["one"].parent, "one")
    train_here(spec, tmp_path / "run", **stopping_after(after))
    assert len(steps(tmp_path / "run")) == after
    train_here(spec, tmp_path / "run", attempt=2)
    resumed = steps(tmp_path / "run")
    assert [s.attempt for s in resumed] == [1] * after + [2] * (STEPS - after)
    assert [_learned(s) for s in resumed[after:]] == [_learned(s) for s in steps(whole["one"])[after:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two", "two"),
        ("two", "two, accumulating"),
        ("two", "one"),
        ("two", "one, accumulating"),
        ("two", "three"),
        ("one", "two"),
    ],
)
def test_a_resume_with_other_ranks_loses_what_an_uninterrupted_run_loses(
    before: str, after: str, tmp_path: Path, whole: dict[str, Path]
) -> None:
    run_dir = cut(whole[before], tmp_path / "run")
    spec = plan(whole["one"].parent, after)
    if spec.parallel.world_size == 1:
        train_here(spec, run_dir, attempt=2)
    else:
        assert set(train_ranks(spec, run_dir)) == {0}, log(run_dir)
    found, expected = steps(run_dir), steps(whole[before])
    tolerance = 1e-6 if before == after else 1e-5
    assert [s.step for s in found if s.attempt == 2] == [5, 6, 7, 8]
    assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], abs=tolerance)
    assert found[-1].eval_loss == pytest.approx(expected[-1].eval_loss, abs=tolerance)


def test_a_resume_of_a_finished_run_makes_no_step_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, "budget.max_steps=2")
    train_here(spec, tmp_path / "run")
    report = train_here(spec, tmp_path / "run", attempt=2)
    assert (report.outcome, report.steps, report.first_loss) == ("completed", 2, None)
    assert report.checkpoint == "checkpoints/step-00000002"
    assert names(tmp_path / "run") == ["step-00000002"]


def test_time_and_device_hours_add_up_over_attempts(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    first = train_here(spec, tmp_path / "run", **stopping_after(3))
    second = train_here(spec, tmp_path / "run", attempt=2)
    assert second.wall_time_s > first.wall_time_s > 0
    assert second.device_hours == pytest.approx(second.wall_time_s / 3600, rel=1e-6)


def test_a_resume_says_where_it_continues(tmp_path: Path) -> None:
    lines: list[str] = []
    spec = small_spec(tmp_path)
    train_here(spec, tmp_path / "run", **stopping_after(3))
    train_here(spec, tmp_path / "run", attempt=2, say=lines.append)
    assert lines == ["continuing from step-00000003, 768 tokens seen"]


def test_a_resume_on_other_data_is_refused(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    train_here(spec, tmp_path / "run", **stopping_after(3))
    (tmp_path / "text.txt").write_text("another text " * 10_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"step-00000003 was made with other data .* Restore the files of data\."):
        train_here(spec, tmp_path / "run", attempt=2)


@pytest.mark.parametrize("change", ["model.num_layers=3", "model.d_mlp=96", "model.tie_embeddings=false"])
def test_a_resume_with_another_model_is_refused(change: str, tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run", **stopping_after(3))
    with pytest.raises(CheckpointError, match=r"step-00000003 cannot be read: .+"):
        train_here(small_spec(tmp_path, change), tmp_path / "run", attempt=2)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run", **stopping_after(3))
    (part,) = (tmp_path / "run").glob("checkpoints/*/*.distcp")
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"step-00000003 cannot be read: .+"):
        train_here(small_spec(tmp_path), tmp_path / "run", attempt=2)


# What stays on disk.


def test_the_newest_checkpoints_are_kept_and_older_ones_removed(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "checkpoint.every_steps=1", "checkpoint.keep=3"), tmp_path / "run")
    assert names(tmp_path / "run") == ["step-00000004", "step-00000005", "step-00000006"]


def test_keeping_one_checkpoint_keeps_the_last(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep=1"), tmp_path / "run")
    assert names(tmp_path / "run") == ["step-00000006"]


def test_there_is_always_a_checkpoint_at_the_end(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "checkpoint.every_steps=4", "checkpoint.keep=9"), tmp_path / "run")
    assert names(tmp_path / "run") == ["step-00000004", "step-00000006"]


# Saves that did not finish.


def _two_checkpoints(tmp_path: Path) -> Path:
    """A run folder with complete checkpoints of steps 2 and 4."""
    spec = small_spec(tmp_path, "checkpoint.every_steps=2")
    train_here(spec, tmp_path / "run", **stopping_after(4))
    return tmp_path / "run"


def test_an_incomplete_checkpoint_is_skipped_with_a_line(tmp_path: Path) -> None:
    run_dir, lines = _two_checkpoints(tmp_path), []  # type: ignore[var-annotated]
    (run_dir / "checkpoints/step-00000004/.metadata").unlink()
    train_here(small_spec(tmp_path), run_dir, attempt=2, say=lines.append)
    assert lines == [
        "skipping the incomplete checkpoint step-00000004: its save did not finish",
        "continuing from step-00000002, 512 tokens seen",
    ]


def test_a_kill_within_a_save_leaves_the_earlier_checkpoint_usable(tmp_path: Path) -> None:
    run_dir, lines = _two_checkpoints(tmp_path), []  # type: ignore[var-annotated]
    folder = run_dir / "checkpoints"
    (folder / "step-00000004").rename(folder / ".step-00000004.tmp")
    (folder / ".step-00000004.tmp/.metadata").unlink()
    report = train_here(small_spec(tmp_path), run_dir, attempt=2, say=lines.append)
    assert lines[0] == "skipping the incomplete checkpoint .step-00000004.tmp: its save did not finish"
    assert report.outcome == "completed"


def test_a_complete_save_removes_what_killed_saves_left(tmp_path: Path) -> None:
    run_dir = _two_checkpoints(tmp_path)
    (run_dir / "checkpoints/.step-00000005.tmp").mkdir()
    (run_dir / "checkpoints/step-00000004/.metadata").unlink()
    train_here(small_spec(tmp_path), run_dir, attempt=2)
    assert names(run_dir) == ["step-00000002", "step-00000006"]


def test_a_run_without_a_complete_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    run_dir = _two_checkpoints(tmp_path)
    for metadata in run_dir.glob("checkpoints/*/.metadata"):
        metadata.unlink()
    train_here(small_spec(tmp_path), run_dir, attempt=2)
    assert [s.attempt for s in steps(run_dir)] == [2] * 6


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_fails_all_ranks_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("a file where the folder should be", encoding="utf-8")
    spec = small_spec(tmp_path, "parallel.devices_per_node=2", "train.micro_batch=2", "budget.max_steps=1")
    assert train_ranks(spec, tmp_path / "run") == [7, 7]
    for rank in (0, 1):
        assert "the checkpoint of step 1 could not be written" in log(tmp_path / "run", rank)
        assert "Traceback" not in log(tmp_path / "run", rank)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, which holds a few small checkpoints."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount_point)]
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_the_run_with_the_reason_and_keeps_the_checkpoints_before(
    ranks: int, tmp_path: Path, small_disk: Path
) -> None:
    run_dir = small_disk / "run"
    overrides = (f"parallel.devices_per_node={ranks}", "checkpoint.keep=9", "checkpoint.every_steps=1")
    spec = small_spec(tmp_path, *overrides, "budget.max_steps=20")
    assert train_ranks(spec, run_dir) == [7] * ranks, log(run_dir)
    said, left = log(run_dir), names(run_dir)
    assert left == [f"step-{step:08d}" for step in range(1, len(left) + 1)]
    assert left
    failed = f"the checkpoint of step {len(left) + 1} could not be written to {run_dir / 'checkpoints'}: No space left"
    assert failed in said
    assert "Traceback" not in said
    assert read_report(run_dir, 1) is None
    # With room again, the run goes on from there.
    shutil.copytree(run_dir, tmp_path / "roomy")
    lines: list[str] = []
    spec = small_spec(tmp_path, f"train.micro_batch={4 * ranks}", "budget.max_steps=20")
    report = train_here(spec, tmp_path / "roomy", say=lines.append)
    assert lines == [f"continuing from {left[-1]}, {256 * ranks * len(left)} tokens seen"]
    assert (report.outcome, report.steps) == ("completed", 20)
