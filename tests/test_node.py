"""The watcher and its ranks one by one: what they are given, and what they say when they cannot start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import ledger
from orchestrator.errors import NotSubmittedError
from orchestrator.launch import local, node
from orchestrator.launch.lease import folder_of, lease
from orchestrator.project import SOURCE_ROOT
from tests import recorded


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A submitted run of one rank."""
    path = tmp_path / "runs" / "one"
    recorded.planned(path, f"launch.lease_dir={tmp_path / 'leases'}")
    recorded.submission(path, code=str(SOURCE_ROOT))
    return path


def watch(run_dir: Path) -> subprocess.Popen[str]:
    """The watcher, as submitit calls it."""
    call = "import sys; from orchestrator.launch import node; sys.exit(node.run(sys.argv[1]))"
    return subprocess.Popen([sys.executable, "-c", call, str(run_dir)], cwd=SOURCE_ROOT, text=True)


def test_a_run_that_its_watcher_cannot_start_says_why(run_dir: Path) -> None:
    (run_dir / "logs").write_text("in the way")
    assert watch(run_dir).wait(60) == 7
    record = ledger.read(run_dir)
    assert record.state == "failed"
    assert record.exit is not None
    assert record.exit.detail.startswith(f"The run could not be watched: {run_dir / 'logs'}: File exists.")
    assert not list(run_dir.glob(".*"))


def test_a_watcher_asked_to_stop_in_the_queue_ends_without_a_rank(run_dir: Path, tmp_path: Path) -> None:
    with lease(["cpu:0"], 1, folder=folder_of(str(tmp_path / "leases")), submitted_at=0):
        watcher = watch(run_dir)
        while ledger.read(run_dir).state != "queued":
            assert watcher.poll() is None
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(60) == 0
    record = ledger.read(run_dir)
    assert (record.state, record.node is not None and record.node.rank_pids) == ("cancelled", ())


def test_a_rank_whose_watcher_is_gone_does_not_start(run_dir: Path) -> None:
    words = [sys.executable, "-m", "orchestrator.launch.worker", str(run_dir), "1", str(os.getpid() + 1)]
    assert subprocess.run(words, cwd=SOURCE_ROOT, check=False).returncode == -signal.SIGKILL


def test_a_rank_imports_the_frozen_source_before_what_the_user_has_on_his_path(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/opt/mine{os.pathsep}{SOURCE_ROOT}")
    environment = node.source_environment(str(SOURCE_ROOT))
    assert environment == {"PYTHONPATH": f"{SOURCE_ROOT}{os.pathsep}/opt/mine", "PYTHONSAFEPATH": "1"}


def test_a_rank_sees_the_devices_that_it_leased_and_no_others(run_dir: Path) -> None:
    on_gpu = recorded.submission(run_dir, candidates=("gpu:0", "gpu:3"), leases=1, threads_per_rank=None)
    assert node.rank_environment(on_gpu, ("gpu:3",))["CUDA_VISIBLE_DEVICES"] == "3"
    on_cpu = node.rank_environment(recorded.submission(run_dir), ("cpu:0", "cpu:1"))
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["OMP_NUM_THREADS"]) == ("", "2")


def test_a_run_that_submitit_cannot_start_is_not_submitted(run_dir: Path) -> None:
    submission = recorded.submission(run_dir, code=str(SOURCE_ROOT))
    (run_dir / "submitit").write_text("in the way")
    with pytest.raises(NotSubmittedError, match=rf"submitit could not start the run in {run_dir}: FileExistsError"):
        local.submit(run_dir, submission)
