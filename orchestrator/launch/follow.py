"""Following a run from outside: progress while it goes, one block of facts when it has ended.

Takes a run folder, reads its files only; any shell can do it, any number of times.
"""

import codecs
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from orchestrator import ledger
from orchestrator.errors import ConfigError
from orchestrator.launch.stopping import Interrupts
from orchestrator.ledger import RunRecord
from train.report import StepReport

_POLL_S = 0.2
_BAR_FROM_COLUMNS = 110
"""On a narrower terminal the numbers need the room."""
_PLAIN_EVERY_S = 10.0
_PLAIN_STATE_AFTER_S = 2.0


class _Bar:
    """A progress bar on a terminal; elsewhere a line for a state that lasts, then a step's line every ten seconds."""

    def __init__(self, record: RunRecord, console: Console) -> None:
        self.console = console
        self.predicted = record.predicted_peak_bytes
        self.total = record.spec.train.planned_steps
        self.said: str | int | None = None
        self.said_at = 0.0
        self.state = ""
        self.state_since = time.monotonic()
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), TextColumn("{task.fields[facts]}")]
        if console.width >= _BAR_FROM_COLUMNS:
            columns.insert(1, BarColumn(bar_width=20))
        columns.append(TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("queued", total=self.total, facts="")

    def show(self, record: RunRecord) -> None:
        step = record.last_step
        if step is None or step.attempt != record.attempt:
            self._show_state("starting" if record.state in ("submitted", "running") else record.state)
            return
        facts = step_facts(step, step.peak_device_bytes, self.predicted)
        description = f"step {step.step}" + (f"/{self.total}" if self.total else "")
        self.progress.update(self.task, completed=step.step, description=description, facts=facts)
        due = not isinstance(self.said, int) or time.monotonic() - self.said_at > _PLAIN_EVERY_S
        if step.step != self.said and (due or record.state in ledger.ENDED):
            self._plain(f"{description}  {facts}", step.step)

    def _show_state(self, state: str) -> None:
        self.progress.update(self.task, description=state)
        if state != self.state:
            self.state, self.state_since = state, time.monotonic()
        lasts = time.monotonic() - self.state_since >= _PLAIN_STATE_AFTER_S
        if state not in (self.said, *ledger.ENDED) and lasts:
            self._plain(state, state)

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _plain(self, line: str, key: str | int) -> None:
        if not self.console.is_terminal:
            self.said, self.said_at = key, time.monotonic()
            self.say(line)


def step_facts(step: StepReport, peak_bytes: int | None, predicted_bytes: int | None) -> str:
    """One step in one line: loss, tokens/s, peak memory against the prediction."""
    facts = f"loss {step.loss:.3f}  {step.tokens_per_s:,.0f} tokens/s"
    if step.mfu is not None:
        facts += f"  MFU {step.mfu:.0%}"
    return f"{facts}  peak {_beside(size(peak_bytes), size(predicted_bytes))} predicted"


def _beside(measured: str, predicted: str) -> str:
    """Two sizes, the unit once where it is the same."""
    number, _, unit = measured.partition(" ")
    return f"{number} of {predicted}" if unit and predicted.endswith(f" {unit}") else f"{measured} of {predicted}"


def size(count: int | None) -> str:
    """Bytes for a person; unknown stays unknown."""
    if count is None:
        return "unknown"
    return f"{count / 1024**3:.2f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"


def follow(run_dir: Path, console: Console, interrupts: Interrupts | None = None) -> RunRecord:
    """Show progress until the run has ended.

    Where Ctrl-C is counted by `interrupts`, the first asks the run to stop with a checkpoint and the second kills
    it; elsewhere Ctrl-C only stops looking (KeyboardInterrupt).
    """
    bar = _Bar(ledger.read(run_dir), console)
    said = asked = False
    with bar.progress:
        while True:
            record = ledger.read(run_dir)
            bar.show(record)
            if record.state in ledger.ENDED:
                return record
            if interrupts is not None and interrupts.count:
                if not said:
                    bar.say(f"stopping with a checkpoint (Ctrl-C again kills at once): {run_dir}")
                    said = True
                asked = asked or ask_to_stop(record)  # again, until there is a watcher to tell
                if interrupts.count > 1:
                    kill(record)
            time.sleep(_POLL_S)


def ask_to_stop(record: RunRecord) -> bool:
    """SIGTERM to the watcher, which passes it on; False when there is none to tell. Raises ConfigError elsewhere."""
    return record.state not in ledger.ENDED and _tell(record, signal.SIGTERM)


def kill(record: RunRecord) -> None:
    """SIGKILL to the watcher; the kernel kills its ranks with it. Raises ConfigError on another machine."""
    _tell(record, signal.SIGKILL)


def _tell(record: RunRecord, number: signal.Signals) -> bool:
    node = record.node
    if node is None or not ledger.alive(node):
        return False
    if node.host != socket.gethostname():
        raise ConfigError([f"{record.name}: it runs on {node.host}, and can only be stopped from there."])
    try:
        os.kill(node.pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        return False
    return True


def ending(record: RunRecord) -> str:
    """How a run ended, for a person: cause, losses, memory predicted and measured, where everything is."""
    lines = [f"{record.name}: {record.state}"]
    if record.exit is not None:
        lines.append(f"  {record.exit.detail}")
        if record.exit.last_lines:
            lines.append(f"  last lines of rank {record.exit.first_failed_rank}:")
            lines += [f"    {line}" for line in record.exit.last_lines]
    elif record.state == "lost":
        lines.append("  The run is gone and left no word: its watcher was killed, or the machine went down.")
    report = record.report
    if report is not None:
        if report.first_loss is not None and report.final_loss is not None:
            lines.append(f"  training loss   {report.first_loss:.4f} -> {report.final_loss:.4f} nats a token")
        if report.final_eval_nats_per_byte is not None:
            lines.append(f"  held-out loss   {report.final_eval_nats_per_byte:.4f} nats a byte")
        predicted, measured = report.predicted_peak_bytes, report.measured_peak_bytes
        only = " (in the first step alone, which has no optimizer states yet)" if report.steps == 1 else ""
        lines.append(f"  peak memory     {size(predicted)} predicted, {size(measured)} measured{only}")
        if report.tokens_per_s is not None:
            lines.append(f"  speed           {report.tokens_per_s:,.0f} tokens/s")
    elif record.last_step is not None:
        lines.append(f"  last step       {record.last_step.step}, loss {record.last_step.loss:.4f}")
    lines += _tracking(record)
    lines.append(f"  folder          {record.run_dir}")
    if record.state in ("cancelled", "failed", "lost"):
        lines.append(f"  continue with   {ledger.command('resume', record)}")
    return "\n".join(lines)


def _tracking(record: RunRecord) -> list[str]:
    kept = record.tracking
    if kept is None:
        return []
    if kept.warning is not None:
        return [f"  warning         {kept.warning}"]
    if kept.url is not None:
        return [f"  wandb           {kept.url}"]
    if kept.folder is None:
        return []
    folder = Path(kept.folder)
    several = len(list(folder.parent.glob("offline-run-*"))) > 1  # one an attempt
    what = f"{shlex.quote(str(folder.parent))}/offline-run-*" if several else shlex.quote(str(folder))
    return [f"  wandb           offline; to send it: wandb sync {what}"]


def print_log(paths: list[Path], alive: Callable[[], bool], *, forever: bool) -> None:
    """Print log files, and with `forever` what is added until the run has ended."""
    offsets = dict.fromkeys(paths, 0)
    decoders = {path: codecs.getincrementaldecoder("utf-8")("replace") for path in paths}
    while True:
        running = alive()
        for path in paths:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(offsets[path])
                    content = file.read()
                offsets[path] += len(content)
                sys.stdout.write(decoders[path].decode(content))
                sys.stdout.flush()
        if not forever or not running:
            return
        time.sleep(_POLL_S)


@contextmanager
def inline_progress(run_dir: Path, console: Console) -> Iterator[Callable[[StepReport], None]]:
    """For a run in this process: a function to call a step."""
    bar = _Bar(ledger.read(run_dir), console)
    with bar.progress:
        yield lambda report: bar.show(ledger.read(run_dir))
