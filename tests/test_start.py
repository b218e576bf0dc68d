"""What is refused before anything is started: its exit code, its message, and that nothing is left."""

from pathlib import Path

import pytest

from orchestrator import cli
from tests.launched import place
from tests.small_disk import read_only_disk, small_disk


def refused(capsys: pytest.CaptureFixture[str], root: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and message of a run that is not started."""
    code = cli.main(place(root).overrides(*overrides))
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    assert told.out == ""
    return code, told.err


def left(runs_dir: Path) -> list[str]:
    """Names in a runs folder."""
    return [path.name for path in runs_dir.iterdir()] if runs_dir.exists() else []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no such file or folder"),
        (b"", "the files are empty"),
        (b"gr\xfcn", "is not UTF-8 at byte 2"),
    ],
)
def test_data_that_cannot_be_read_is_a_config_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    code, message = refused(capsys, tmp_path, f"data.path={path}")
    assert code == 2
    assert message.startswith(f"data.path={path}: ")
    assert why in message
    assert left(tmp_path / "runs") == []


def test_a_text_that_is_too_short_is_a_config_error_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.txt").write_text("a few words")
    code, message = refused(capsys, tmp_path, f"data.path={tmp_path / 'bad.txt'}")
    assert code == 2
    assert "its training part has" in message
    assert "one sequence with its target takes train.seq_len + 1 = 65" in message
    assert left(tmp_path / "runs") in ([], [".data"])


def test_a_runs_folder_that_cannot_be_written_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with read_only_disk(tmp_path / "runs"):
        code, message = refused(capsys, tmp_path)
    assert code == 6
    assert message.startswith(f"launch.runs_dir={tmp_path / 'runs'}: ")
    assert "Nothing was started. Set launch.runs_dir to a folder that you can write" in message


def test_a_runs_folder_without_room_for_the_checkpoints_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "runs", 1 << 20):
        code, message = refused(capsys, tmp_path)
        assert left(tmp_path / "runs") == []
    assert code == 6
    assert "1.0 MiB free, and this run's checkpoints take" in message


def test_a_lease_folder_that_cannot_be_written_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, message = refused(capsys, tmp_path, f"launch.lease_dir={tmp_path / 'file' / 'leases'}")
    assert code == 6
    assert message.startswith("launch.lease_dir=")
    assert left(tmp_path / "runs") == []


def test_more_ranks_than_slots_are_a_config_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, tmp_path, "parallel.devices_per_node=4", "train.micro_batch=1")
    assert code == 2
    assert "each rank leases 1 of this machine's 2 CPU slots. Set it to at most 2, or launch.cpu_slots=4" in message
    assert left(tmp_path / "runs") == []


def test_inline_is_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, tmp_path, "launch=inline", "parallel.devices_per_node=2")
    assert code == 2
    assert "launch=inline is one rank in this process. Set it to 1, or use launch=local" in message
