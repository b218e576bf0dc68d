"""The one cause of an ending, from exit codes, the ranks' own records and their logs."""

import signal
from pathlib import Path

import pytest

from orchestrator.errors import ExitCode
from orchestrator.launch.cause import RankEnd, cancelled_in_the_queue, cause_of
from tests import recorded
from tests.small_disk import fill, small_disk

KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM
# What torch 2.9 says on the ranks whose peer is gone.
SYMPTOMS = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:33461",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:4711: Connection reset by peer",
    "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error, NCCL version 2.27",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "[1]: DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d store",
    "The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 40001).",
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    path.mkdir()
    return path


def end(rank: int, returncode: int, at: float, *, killed_by_us: bool = False) -> RankEnd:
    return RankEnd(rank=rank, returncode=returncode, time=at, killed_by_us=killed_by_us)


@pytest.mark.parametrize(
    ("outcome", "cause"), [("completed", "completed"), ("budget", "budget"), ("stopped", "cancelled")]
)
def test_a_report_and_ranks_that_ended_well_are_the_outcome(run_dir: Path, outcome: str, cause: str) -> None:
    recorded.train_report(run_dir, outcome=outcome, stop_reason="budget.max_steps=3")
    ended = cause_of(run_dir, 1, [end(1, 0, 5.0), end(0, 0, 6.0)])
    assert (ended.cause, ended.exit_code, ended.first_failed_rank) == (cause, ExitCode.DONE, None)
    assert ended.detail == "Ended after step 3: budget.max_steps=3."


def test_the_rank_that_failed_first_in_time_is_named_though_its_process_ended_last(run_dir: Path) -> None:
    recorded.failure(run_dir, 0, at=20.0, message="index 3 is out of bounds", kind="IndexError")
    recorded.failure(run_dir, 2, at=10.0, message="no such table\nand more", kind="KeyError")
    ended = cause_of(run_dir, 1, [end(0, 7, 20.5), end(1, 0, 21.0), end(2, 7, 22.0)])
    assert (ended.cause, ended.exit_code, ended.first_failed_rank) == ("rank_failed", ExitCode.RUN_FAILED, 2)
    assert ended.detail == "Rank 2 failed first: KeyError: no such table"


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_a_peer_says_of_a_broken_connection_never_comes_before_a_ranks_own_failure(
    run_dir: Path, symptom: str
) -> None:
    recorded.failure(run_dir, 0, at=10.0, message=symptom)
    recorded.failure(run_dir, 1, at=12.0, message="division by zero", kind="ZeroDivisionError")
    ended = cause_of(run_dir, 1, [end(0, 7, 10.1), end(1, 7, 12.1)])
    assert ended.detail == "Rank 1 failed first: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_killed_rank_comes_before_what_its_peers_say_and_its_signal_is_named(run_dir: Path, symptom: str) -> None:
    recorded.failure(run_dir, 0, at=10.0, message=symptom)
    ended = cause_of(run_dir, 1, [end(0, 7, 10.2), end(1, KILLED, 10.1)])
    assert (ended.cause, ended.exit_code, ended.first_failed_rank) == ("rank_failed", ExitCode.RUN_FAILED, 1)
    assert ended.detail == "Rank 1 failed first: killed by SIGKILL."


def test_an_error_of_torchs_collectives_is_a_symptom_whatever_it_says(run_dir: Path) -> None:
    recorded.failure(run_dir, 0, at=10.0, message="went wrong", kind="torch.distributed.DistNetworkError")
    recorded.failure(run_dir, 1, at=12.0, message="division by zero", kind="ZeroDivisionError")
    assert cause_of(run_dir, 1, [end(0, 7, 10.1), end(1, 7, 12.1)]).first_failed_rank == 1


def test_of_several_symptoms_alone_the_first_is_named(run_dir: Path) -> None:
    recorded.failure(run_dir, 0, at=12.0, message=SYMPTOMS[0])
    recorded.failure(run_dir, 1, at=10.0, message=SYMPTOMS[1])
    ended = cause_of(run_dir, 1, [end(0, 7, 12.1), end(1, 7, 12.2)])
    assert ended.first_failed_rank == 1


def test_ranks_that_we_killed_because_of_another_are_not_the_cause(run_dir: Path) -> None:
    recorded.failure(run_dir, 1, at=10.0, message=SYMPTOMS[0])
    ended = cause_of(run_dir, 1, [end(1, 7, 10.0), end(0, KILLED, 9.0, killed_by_us=True)])
    assert ended.first_failed_rank == 1


def test_an_explained_failure_is_said_in_full_and_is_no_symptom_whatever_words_it_has(run_dir: Path) -> None:
    words = "the checkpoint could not be written to the store: broken pipe. Free space there, then resume."
    recorded.failure(run_dir, 1, at=10.0, message=words, explained=True, kind="CheckpointError")
    ended = cause_of(run_dir, 1, [end(0, KILLED, 12.0), end(1, 7, 10.1)])
    assert ended.detail == f"Rank 1 failed first: {words}"


def test_running_out_of_memory_is_a_cause_of_its_own(run_dir: Path) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    recorded.failure(run_dir, 0, at=10.0, message=message, kind="torch.OutOfMemoryError", out_of_memory=True)
    ended = cause_of(run_dir, 1, [end(0, 7, 10.1)])
    assert (ended.cause, ended.exit_code) == ("out_of_memory", ExitCode.RUN_FAILED)
    assert message in ended.detail


def test_what_is_wrong_with_the_data_is_a_config_error(run_dir: Path) -> None:
    message = "data.path=x: there is no such file. Set it to one that exists"
    recorded.failure(run_dir, 0, at=10.0, message=message, kind="DataError", explained=True)
    ended = cause_of(run_dir, 1, [end(0, 2, 10.1)])
    assert (ended.cause, ended.exit_code) == ("config_error", ExitCode.CONFIG_ERROR)


def test_ranks_that_were_killed_because_they_did_not_stop_are_cancelled_and_the_run_failed(run_dir: Path) -> None:
    ended = cause_of(run_dir, 1, [end(rank, KILLED, 10.0, killed_by_us=True) for rank in (0, 1)])
    assert (ended.cause, ended.exit_code) == ("cancelled", ExitCode.RUN_FAILED)
    assert "did not stop in launch.cancel_timeout_s and were killed; the last checkpoint stands" in ended.detail


def test_a_second_ctrl_c_in_a_run_of_this_process_is_a_cancel_and_no_fault(run_dir: Path) -> None:
    recorded.failure(run_dir, 0, at=10.0, message="KeyboardInterrupt", kind="KeyboardInterrupt")
    ended = cause_of(run_dir, 1, [end(0, 7, 10.0)])
    assert (ended.cause, ended.exit_code) == ("cancelled", ExitCode.RUN_FAILED)
    assert ended.detail == "Interrupted before a checkpoint was written; the last one stands."


def test_a_run_cancelled_in_the_queue_is_done(run_dir: Path) -> None:
    ended = cancelled_in_the_queue()
    assert (ended.cause, ended.exit_code, ended.last_lines) == ("cancelled", ExitCode.DONE, ())
    assert "queued; no rank was started" in ended.detail


def test_a_rank_that_ends_without_a_word_is_named_with_its_exit_code(run_dir: Path) -> None:
    ended = cause_of(run_dir, 1, [end(0, 0, 11.0), end(1, 66, 10.0)])
    assert ended.detail == "Rank 1 failed first: its process ended with exit code 66 and said nothing."


def test_ranks_that_all_end_well_without_a_report_are_a_failure(run_dir: Path) -> None:
    ended = cause_of(run_dir, 1, [end(0, 0, 11.0)])
    assert (ended.cause, ended.exit_code) == ("rank_failed", ExitCode.RUN_FAILED)


def test_a_report_does_not_hide_a_rank_that_failed_after_it(run_dir: Path) -> None:
    recorded.train_report(run_dir)
    ended = cause_of(run_dir, 1, [end(0, 0, 10.0), end(1, KILLED, 10.0)])
    assert (ended.cause, ended.first_failed_rank) == ("rank_failed", 1)


def test_an_earlier_attempts_records_are_not_read(run_dir: Path) -> None:
    recorded.train_report(run_dir, attempt=1)
    recorded.failure(run_dir, 0, at=1.0, message="of attempt 1", attempt=1)
    ended = cause_of(run_dir, 2, [end(0, KILLED, 10.0)])
    assert ended.detail == "Rank 0 failed first: killed by SIGKILL."


def test_the_last_lines_are_those_of_the_rank_that_failed(run_dir: Path) -> None:
    recorded.rank_log(run_dir, 0, "of rank 0\n")
    recorded.rank_log(run_dir, 1, "".join(f"line {i}\n" for i in range(30)) + "Ende: ß\n")
    with (run_dir / "logs" / "attempt1.rank1.log").open("ab") as log:
        log.write(b"half a letter \xc3")
    ended = cause_of(run_dir, 1, [end(0, 7, 11.0), end(1, KILLED, 10.0)])
    assert ended.last_lines == (*(f"line {i}" for i in range(20, 30)), "Ende: ß", "half a letter �")


def test_a_rank_that_could_not_say_a_word_on_a_full_disk_is_explained_by_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        fill(disk)
        ended = cause_of(disk, 1, [end(0, 7, 10.0)])
    assert ended.detail == (
        f"Rank 0 failed first: its process ended with exit code 7 and said nothing. The disk of {disk} is full. "
        "Free space there, then resume."
    )
