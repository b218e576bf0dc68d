"""Why an attempt ended: the report, the ranks' own records and their exit codes, weighed.

Takes the ends of the ranks' processes, gives an ExitRecord that names the first rank that failed in time.
"""

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ExitCode
from orchestrator.ledger import ExitRecord
from train.report import read_report

_LAST_LINES = 12
# What a rank says whose peer died: a symptom, so it never comes before another rank's own failure.
_SYMPTOMS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "timed out",
    "gloo",
    "nccl",
    "store",
)
_SYMPTOM_KINDS = "torch.distributed."
# Less room than a rank's last words take: it could not leave them.
_FULL_DISK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank's process ended."""

    rank: int
    returncode: int
    time: float
    """When the watcher saw it, seconds since the epoch."""
    killed_by_us: bool


def cause_of(run_dir: Path, attempt: int, ends: Sequence[RankEnd]) -> ExitRecord:
    """The one cause of an ending."""
    report = read_report(run_dir, attempt)
    failed = [end for end in ends if end.returncode != 0]
    if report is not None and not failed:
        detail = f"Ended after step {report.steps}: {report.stop_reason}."
        return _record("cancelled" if report.outcome == "stopped" else report.outcome, ExitCode.DONE, detail)
    records = {end.rank: _failure(run_dir, attempt, end.rank) for end in failed}
    first = min(failed or ends, key=lambda end: _when(end, records.get(end.rank)))
    record = records.get(first.rank)
    lines = _last_lines(run_dir, attempt, first.rank)
    if first.killed_by_us and record is None:
        detail = "The ranks did not stop in launch.cancel_timeout_s and were killed; the last checkpoint stands."
        return _record("cancelled", ExitCode.RUN_FAILED, detail, first.rank, lines)
    if record is not None and record["kind"] == "KeyboardInterrupt":
        detail = "Interrupted before a checkpoint was written; the last one stands."
        return _record("cancelled", ExitCode.RUN_FAILED, detail, first.rank, lines)
    cause = "rank_failed"
    if record is not None and record["out_of_memory"]:
        cause = "out_of_memory"
    if record is not None and record["kind"] == "DataError":
        cause = "config_error"
    code = ExitCode.CONFIG_ERROR if cause == "config_error" else ExitCode.RUN_FAILED
    return _record(cause, code, _detail(run_dir, first, record), first.rank, lines)


def cancelled_in_the_queue() -> ExitRecord:
    """The ending of a run that was asked to stop before its turn."""
    return _record("cancelled", ExitCode.DONE, "Cancelled while it was queued; no rank was started.")


def watcher_failed(run_dir: Path, error: OSError) -> ExitRecord:
    """The ending of a run that its watcher could not start or watch."""
    detail = (
        f"The run could not be watched: {error.filename or run_dir}: {error.strerror}. Free space there, then resume."
    )
    return _record("rank_failed", ExitCode.RUN_FAILED, detail)


def _record(
    cause: str,
    exit_code: ExitCode,
    detail: str,
    rank: int | None = None,
    lines: tuple[str, ...] = (),
) -> ExitRecord:
    return ExitRecord.model_validate(
        {
            "cause": cause,
            "exit_code": int(exit_code),
            "detail": detail,
            "first_failed_rank": rank,
            "last_lines": lines,
            "ended_at": time.time(),
        }
    )


def _failure(run_dir: Path, attempt: int, rank: int) -> dict[str, Any] | None:
    """What train.rank left, None where the rank died without a word."""
    try:
        content = json.loads((run_dir / f"failure.{attempt}.rank{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    assert isinstance(content, dict)
    return content


def _when(end: RankEnd, record: dict[str, Any] | None) -> tuple[int, float]:
    """Ranks in order of blame: own failures by time, then symptoms of another's, then those we killed."""
    if record is None:
        return (2 if end.killed_by_us else 0, end.time)
    words = any(word in record["message"].lower() for word in _SYMPTOMS)
    symptom = (words or record["kind"].startswith(_SYMPTOM_KINDS)) and not record["explained"]
    return (1 if symptom else 0, float(record["time"]))


def _detail(run_dir: Path, end: RankEnd, record: dict[str, Any] | None) -> str:
    begin = f"Rank {end.rank} failed first: "
    if record is not None:
        message = str(record["message"]).strip().splitlines()
        if record["explained"]:
            return f"{begin}{record['message']}"
        return f"{begin}{record['kind']}: {message[0] if message else ''}"
    if end.returncode < 0:
        return f"{begin}killed by {_signal_name(-end.returncode)}."
    silent = f"{begin}its process ended with exit code {end.returncode} and said nothing."
    if shutil.disk_usage(run_dir).free >= _FULL_DISK_BYTES:
        return silent
    return f"{silent} The disk of {run_dir} is full. Free space there, then resume."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(run_dir: Path, attempt: int, rank: int) -> tuple[str, ...]:
    path = run_dir / "logs" / f"attempt{attempt}.rank{rank}.log"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_LAST_LINES:])
