"""Leases between real processes: one holder an id, first come first served, and nothing left by the dead."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from orchestrator.errors import NotSubmittedError
from orchestrator.launch.lease import StoppedWaitingError, default_folder, folder_of, lease

TIMEOUT_S = 60.0
FORK = multiprocessing.get_context("fork")  # children that start at once; this file imports no torch


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fails after a long while."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def queued(folder: Path) -> int:
    """Tickets in the queue."""
    queue = folder / "queue-cpu"
    return len([path for path in queue.iterdir() if not path.name.startswith(".")]) if queue.exists() else 0


def hold(folder: Path, ids: int, count: int, submitted_at: float, said: Path, until_removed: Path | None) -> None:
    """Lease, add a line to `said`, hold until the file is gone."""
    names = [f"cpu:{i}" for i in range(ids)]
    with lease(names, count, folder=folder, submitted_at=submitted_at) as leased:
        with said.open("a") as file:
            file.write(f"{submitted_at:g} {','.join(leased.ids)}\n")
        while until_removed is not None and until_removed.exists():
            time.sleep(0.01)


def holder(
    folder: Path, *, ids: int = 2, count: int = 1, submitted_at: float, said: Path, held: Path | None = None
) -> ForkProcess:
    """A process that leases, and holds while the file `held` is there."""
    if held is not None:
        held.touch()
    process = FORK.Process(target=hold, args=(folder, ids, count, submitted_at, said, held), daemon=True)
    process.start()
    return process


def lines(said: Path) -> list[str]:
    return said.read_text().splitlines() if said.exists() else []


def hammer(folder: Path, claims: Path, number: int) -> None:
    """Lease again and again; two holders of an id would make the same file, which fails."""
    ids = [f"gpu:{i}" for i in range(3)]
    for turn in range(6):
        with lease(ids, 1 + (number + turn) % 3, folder=folder, submitted_at=time.time()) as leased:
            for name in leased.ids:
                os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL))
            time.sleep(0.002)
            for name in leased.ids:
                (claims / name).unlink()


def test_an_id_never_has_two_holders(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    workers = [FORK.Process(target=hammer, args=(tmp_path / "lease", claims, number)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT_S)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert queued(tmp_path / "lease") == 0


def test_the_queue_is_served_in_the_order_of_submission_whoever_asks_first(tmp_path: Path) -> None:
    folder, said, held = tmp_path / "lease", tmp_path / "said", tmp_path / "held"
    first = holder(folder, ids=1, submitted_at=1, said=said, held=held)
    until(lambda: len(lines(said)) == 1)
    later = []
    for submitted_at in (5, 3, 4, 2):  # asked in this order
        later.append(holder(folder, ids=1, submitted_at=submitted_at, said=said))
        until(lambda: queued(folder) == len(later))
    held.unlink()
    for process in [first, *later]:
        process.join(TIMEOUT_S)
    assert [line.split()[0] for line in lines(said)] == ["1", "2", "3", "4", "5"]


def test_a_run_that_needs_more_than_is_free_waits_and_is_not_overtaken(tmp_path: Path) -> None:
    folder, said, held = tmp_path / "lease", tmp_path / "said", tmp_path / "held"
    one_of_two = holder(folder, count=1, submitted_at=1, said=said, held=held)
    until(lambda: len(lines(said)) == 1)
    both = holder(folder, count=2, submitted_at=2, said=said)
    until(lambda: queued(folder) == 1)
    small = holder(folder, count=1, submitted_at=3, said=said)
    until(lambda: queued(folder) == 2)
    time.sleep(0.5)
    assert lines(said) == ["1 cpu:0"]
    held.unlink()
    for process in (one_of_two, both, small):
        process.join(TIMEOUT_S)
    assert lines(said) == ["1 cpu:0", "2 cpu:0,cpu:1", "3 cpu:0"]


def test_runs_that_fit_beside_each_other_hold_at_the_same_time(tmp_path: Path) -> None:
    folder, said, held = tmp_path / "lease", tmp_path / "said", tmp_path / "held"
    both = [holder(folder, submitted_at=number, said=said, held=held) for number in (1, 2)]
    until(lambda: len(lines(said)) == 2)
    held.unlink()
    for process in both:
        process.join(TIMEOUT_S)
    assert sorted(line.split()[1] for line in lines(said)) == ["cpu:0", "cpu:1"]


def test_a_holder_killed_without_a_word_frees_its_lease(tmp_path: Path) -> None:
    folder, said, held = tmp_path / "lease", tmp_path / "said", tmp_path / "held"
    killed = holder(folder, count=2, submitted_at=1, said=said, held=held)
    until(lambda: len(lines(said)) == 1)
    killed.kill()
    next_one = holder(folder, count=2, submitted_at=2, said=said)
    next_one.join(TIMEOUT_S)
    assert lines(said)[1] == "2 cpu:0,cpu:1"


def test_a_waiting_run_killed_without_a_word_does_not_hold_up_those_behind_it(tmp_path: Path) -> None:
    folder, said, held = tmp_path / "lease", tmp_path / "said", tmp_path / "held"
    first = holder(folder, ids=1, submitted_at=1, said=said, held=held)
    until(lambda: len(lines(said)) == 1)
    killed = holder(folder, ids=1, submitted_at=2, said=said)
    until(lambda: queued(folder) == 1)
    behind = holder(folder, ids=1, submitted_at=3, said=said)
    until(lambda: queued(folder) == 2)
    killed.kill()
    held.unlink()
    for process in (first, behind):
        process.join(TIMEOUT_S)
    assert [line.split()[0] for line in lines(said)] == ["1", "3"]
    assert queued(folder) == 0


def test_a_lease_lasts_until_the_last_process_that_was_given_its_descriptors_is_gone(tmp_path: Path) -> None:
    with lease(["gpu:0"], 1, folder=tmp_path, submitted_at=1) as leased:
        rank = subprocess.Popen(["sleep", "600"], pass_fds=leased.descriptors)
    polls = iter([False, False, True])
    with (
        pytest.raises(StoppedWaitingError),
        lease(["gpu:0"], 1, folder=tmp_path, submitted_at=2, stop_requested=lambda: next(polls)),
    ):
        pytest.fail("its rank still runs")
    rank.kill()
    rank.wait()
    with lease(["gpu:0"], 1, folder=tmp_path, submitted_at=3) as leased:
        assert leased.ids == ("gpu:0",)


def test_a_queued_run_that_is_asked_to_stop_gives_up_its_place(tmp_path: Path) -> None:
    with lease(["gpu:0"], 1, folder=tmp_path, submitted_at=1) as leased:
        polls = iter([False, False, True])
        with (
            pytest.raises(StoppedWaitingError),
            lease(["gpu:0"], 1, folder=tmp_path, submitted_at=2, stop_requested=lambda: next(polls)),
        ):
            pytest.fail("it was given what is held")
        assert queued(tmp_path) == 0
        assert leased.ids == ("gpu:0",)


def test_a_run_asked_to_stop_before_its_turn_takes_nothing_though_all_is_free(tmp_path: Path) -> None:
    with (
        pytest.raises(StoppedWaitingError),
        lease(["gpu:0"], 1, folder=tmp_path, submitted_at=1, stop_requested=lambda: True),
    ):
        pytest.fail("it was given a lease")


def test_a_program_started_while_a_lease_is_held_does_not_hold_it(tmp_path: Path) -> None:
    with lease(["gpu:0"], 1, folder=tmp_path, submitted_at=1):
        bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with lease(["gpu:0"], 1, folder=tmp_path, submitted_at=2) as leased:
        assert leased.ids == ("gpu:0",)
    assert bystander.poll() is None
    bystander.communicate(b"\n")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be several users")
def test_users_share_a_lease_folder_that_any_of_them_made() -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o777)
        folder, said = Path(parent) / "leases", Path(parent) / "said"
        said.touch()
        said.chmod(0o666)
        for number, user in enumerate((1001, 1002, 1001)):
            process = FORK.Process(target=hold_as, args=(user, folder, number, said))
            process.start()
            process.join(TIMEOUT_S)
        assert lines(said) == ["0 cpu:0", "1 cpu:0", "2 cpu:0"]


def hold_as(user: int, folder: Path, submitted_at: float, said: Path) -> None:
    """Lease as another user, and leave a dead ticket behind."""
    os.umask(0o022)
    os.setuid(user)
    hold(folder_of(str(folder)), 1, 1, submitted_at, said, None)
    (folder / "queue-cpu" / f"{0:020d}-{user}").touch()


def test_the_default_folder_is_one_for_the_machine_whatever_tmpdir_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = default_folder()
    monkeypatch.setenv("TMPDIR", "/somewhere/else")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert default_folder() == before


def test_a_run_that_waits_for_gpus_holds_up_no_cpu_run(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    both = [FORK.Process(target=_lease_a_gpu, args=(tmp_path, at, held), daemon=True) for at in (0.0, 1.0)]
    for process in both:
        process.start()
    queue = tmp_path / "queue-gpu"
    until(lambda: (tmp_path / "gpu:a").exists() and queue.exists() and len(list(queue.iterdir())) == 1)
    with lease(["cpu:0"], 1, folder=tmp_path, submitted_at=2) as leased:
        assert leased.ids == ("cpu:0",)
    held.unlink()
    for process in both:
        process.join(10)


def _lease_a_gpu(folder: Path, submitted_at: float, held: Path) -> None:
    with lease(["gpu:a"], 1, folder=folder, submitted_at=submitted_at):
        while held.exists():
            time.sleep(0.01)


def test_a_lease_folder_that_cannot_be_made_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotSubmittedError, match=r"launch\.lease_dir=.*/leases cannot be written \(File exists\)"):
        folder_of(str(tmp_path / "file" / "leases"))
    assert folder_of(str(tmp_path / "mine")) == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
