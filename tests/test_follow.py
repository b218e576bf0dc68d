"""Following a run from its files: the bar, the plain lines, how an ending reads, and whom a signal reaches."""

import io
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from orchestrator import ledger
from orchestrator.errors import ConfigError
from orchestrator.launch import follow
from orchestrator.launch.stopping import Interrupts
from orchestrator.ledger import this_process
from orchestrator.tracking import TrackingRecord, record_file
from tests import recorded


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A running run of 20 steps."""
    path = tmp_path / "runs" / "one"
    recorded.planned(path, "budget.max_steps=20")
    recorded.submission(path)
    recorded.node(path)
    return path


@pytest.fixture
def watcher(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the watcher's place, which a signal ends."""
    process = subprocess.Popen(["sleep", "600"])
    recorded.node(run_dir, pid=process.pid, process_start=psutil.Process(process.pid).create_time())
    yield process
    process.kill()
    process.wait()


def followed(run_dir: Path, *, terminal: bool, seconds: float = 0.6) -> str:
    """What is shown of a run that ends after a while."""
    ended = threading.Timer(seconds, recorded.exit_record, [run_dir])
    ended.start()
    console = Console(force_terminal=terminal, file=io.StringIO(), width=160, color_system=None)
    record = follow.follow(run_dir, console)
    ended.join()
    assert record.state == "completed"
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Progress.


def test_a_steps_line_has_loss_speed_and_peak_against_the_prediction(run_dir: Path) -> None:
    step = recorded.step(run_dir, 3, tokens_per_s=51234.0)
    facts = follow.step_facts(step, recorded.MEASURED, recorded.PREDICTED)
    assert facts == "loss 2.000  51,234 tokens/s  peak 2.00 of 3.00 GiB predicted"
    assert "  MFU 42%  " in follow.step_facts(recorded.step(run_dir, 4, mfu=0.42), 1, 1)


def test_what_nobody_measured_or_predicted_is_unknown_and_never_zero(run_dir: Path) -> None:
    step = recorded.step(run_dir, 3)
    assert follow.step_facts(step, None, None).endswith("peak unknown of unknown predicted")
    assert [follow.size(count) for count in (None, 0, 700 << 20, 5 << 29)] == [
        "unknown",
        "0 MiB",
        "700 MiB",
        "2.50 GiB",
    ]


def test_the_bar_on_a_terminal_shows_step_loss_speed_peak_and_time_left(run_dir: Path) -> None:
    def train() -> None:
        for number in range(1, 5):
            time.sleep(0.4)
            recorded.step(run_dir, number)

    trainer = threading.Thread(target=train)
    trainer.start()
    shown = followed(run_dir, terminal=True, seconds=2.2)
    trainer.join()
    assert re.search(r"step 4/20 .*loss 1\.500  5,120 tokens/s  peak 2\.00 of 3\.00 GiB predicted 0:00:0\d", shown)


def test_elsewhere_there_is_a_line_for_the_first_step_and_none_for_each_of_the_next(run_dir: Path) -> None:
    for number in range(1, 4):
        recorded.step(run_dir, number)
    shown = followed(run_dir, terminal=False)
    assert shown == "step 3/20  loss 2.000  5,120 tokens/s  peak 2.00 of 3.00 GiB predicted\n"


def test_elsewhere_a_state_that_lasts_is_said_once(run_dir: Path) -> None:
    recorded.node(run_dir, rank_pids=())
    assert followed(run_dir, terminal=False, seconds=3.0) == "queued\n"


def test_a_run_without_a_planned_end_shows_the_step_alone(tmp_path: Path) -> None:
    recorded.planned(tmp_path / "two", "optim.schedule=constant", "budget.max_steps=null", "budget.max_wall_time_s=60")
    recorded.submission(tmp_path / "two")
    recorded.node(tmp_path / "two")
    recorded.step(tmp_path / "two", 7)
    assert followed(tmp_path / "two", terminal=False).startswith("step 7  loss")


def test_a_resumed_run_shows_nothing_of_the_attempt_before_it(run_dir: Path) -> None:
    recorded.step(run_dir, 9)
    recorded.submission(run_dir, attempt=2)
    recorded.node(run_dir, attempt=2)
    ended = threading.Timer(0.5, recorded.exit_record, [run_dir, 2])
    ended.start()
    console = Console(force_terminal=True, file=io.StringIO(), width=160, color_system=None)
    follow.follow(run_dir, console)
    ended.join()
    assert isinstance(console.file, io.StringIO)
    assert "starting" in console.file.getvalue()
    assert "step 9" not in console.file.getvalue()


# Stopping.


def test_the_first_ctrl_c_asks_and_the_second_kills(run_dir: Path, watcher: subprocess.Popen[bytes]) -> None:
    said = Console(file=io.StringIO(), width=300)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        record = follow.follow(run_dir, said, interrupts)
    assert record.state == "lost"  # it died of being asked, as no real watcher does
    assert watcher.wait(10) == -signal.SIGTERM
    assert isinstance(said.file, io.StringIO)
    assert said.file.getvalue() == f"stopping with a checkpoint (Ctrl-C again kills at once): {run_dir}\n"


def test_two_ctrl_c_kill_a_watcher_that_does_not_stop(run_dir: Path) -> None:
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; sleep 600 & wait"], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    deaf.stdout.readline()
    recorded.node(run_dir, pid=deaf.pid, process_start=psutil.Process(deaf.pid).create_time())
    children = psutil.Process(deaf.pid).children()
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        follow.follow(run_dir, Console(file=io.StringIO()), interrupts)
    assert deaf.wait(10) == -signal.SIGKILL
    for child in children:
        child.kill()


def test_a_ctrl_c_before_there_is_a_watcher_reaches_it_once_it_is_there(
    run_dir: Path, watcher: subprocess.Popen[bytes]
) -> None:
    record = run_dir / "node.1.json"
    kept = record.read_text()
    record.unlink()
    late = threading.Timer(0.7, record.write_text, [kept])
    late.start()
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        follow.follow(run_dir, Console(file=io.StringIO()), interrupts)
    assert watcher.wait(10) == -signal.SIGTERM


def test_who_only_looks_stops_looking(run_dir: Path) -> None:
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        follow.follow(run_dir, Console(file=io.StringIO()))
    assert ledger.read(run_dir).state == "running"


@pytest.mark.parametrize("stop", [follow.ask_to_stop, follow.kill])
def test_the_process_of_the_same_number_on_this_machine_is_not_touched_for_a_run_on_another(
    run_dir: Path, watcher: subprocess.Popen[bytes], stop: object
) -> None:
    recorded.node(run_dir, pid=watcher.pid, host="elsewhere")
    with pytest.raises(ConfigError, match="one: it runs on elsewhere, and can only be stopped from there"):
        stop(ledger.read(run_dir))  # type: ignore[operator]
    time.sleep(0.1)
    assert watcher.poll() is None


def test_a_watcher_that_is_gone_is_not_told(run_dir: Path) -> None:
    recorded.dead_node(run_dir)
    assert not follow.ask_to_stop(ledger.read(run_dir))
    recorded.node(run_dir)
    recorded.exit_record(run_dir)
    assert this_process().pid == os.getpid()
    assert not follow.ask_to_stop(ledger.read(run_dir))


# How an ending reads.


def test_a_completed_run_says_losses_memory_speed_and_folder(run_dir: Path) -> None:
    recorded.exit_record(run_dir)
    recorded.train_report(run_dir)
    assert follow.ending(ledger.read(run_dir)) == "\n".join(
        [
            "one: completed",
            "  Ended after step 3: budget.max_steps=3.",
            "  training loss   6.0000 -> 2.0000 nats a token",
            "  held-out loss   2.1000 nats a byte",
            "  peak memory     3.00 GiB predicted, 2.00 GiB measured",
            "  speed           5,120 tokens/s",
            f"  folder          {run_dir}",
        ]
    )


def test_a_failed_run_says_the_cause_the_last_lines_and_how_to_go_on(run_dir: Path) -> None:
    detail = "Rank 1 failed first: killed by SIGKILL."
    recorded.exit_record(
        run_dir, cause="rank_failed", exit_code=7, detail=detail, first_failed_rank=1, last_lines=("one", "two")
    )
    assert follow.ending(ledger.read(run_dir)) == "\n".join(
        [
            "one: failed",
            f"  {detail}",
            "  last lines of rank 1:",
            "    one",
            "    two",
            f"  folder          {run_dir}",
            f"  continue with   python -m orchestrator resume one --runs-dir {run_dir.parent}",
        ]
    )


def test_a_cancelled_run_says_how_to_go_on(run_dir: Path) -> None:
    recorded.exit_record(run_dir, cause="cancelled", detail="Ended after step 3: asked to stop.")
    recorded.train_report(run_dir, outcome="stopped", final_eval_nats_per_byte=None, measured_peak_bytes=None)
    text = follow.ending(ledger.read(run_dir))
    assert text.startswith("one: cancelled\n  Ended after step 3: asked to stop.\n")
    assert "held-out" not in text
    assert "3.00 GiB predicted, unknown measured" in text
    assert "continue with   python -m orchestrator resume one" in text


def test_a_lost_run_says_that_it_left_no_word(run_dir: Path) -> None:
    recorded.dead_node(run_dir)
    text = follow.ending(ledger.read(run_dir))
    assert "one: lost\n  The run is gone and left no word: its watcher was killed, or the machine went down." in text
    assert "continue with" in text


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ({"mode": "online", "url": "https://wandb/x"}, "  wandb           https://wandb/x"),
        ({"mode": "offline", "folder": "/w"}, "  wandb           offline; to send it: wandb sync /w"),
        ({"warning": "wandb broke"}, "  warning         wandb broke"),
    ],
)
def test_an_ending_says_where_the_metrics_are(run_dir: Path, kept: dict[str, str], line: str) -> None:
    recorded.exit_record(run_dir)
    fields = dict.fromkeys(TrackingRecord.model_fields) | kept
    ledger.write(record_file(run_dir, 1), TrackingRecord.model_validate(fields))
    assert line in follow.ending(ledger.read(run_dir)).splitlines()


# Logs.


def test_a_log_that_grows_is_printed_whole_though_letters_come_in_halves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.log"
    pieces = iter([b"eins \xc3", b"\x9f zwei\n", b"drei\n"])

    def alive() -> bool:
        piece = next(pieces, None)
        if piece is None:
            return False
        with path.open("ab") as log:
            log.write(piece)
        return True

    follow.print_log([path], alive, forever=True)
    assert capsys.readouterr().out == "eins ß zwei\ndrei\n"
    follow.print_log([path, tmp_path / "missing.log"], lambda: True, forever=False)
    assert capsys.readouterr().out == "eins ß zwei\ndrei\n"
