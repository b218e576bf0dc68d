"""Predicted beside measured: what finished runs show of the estimate.

Takes a folder of runs, gives one row an attempt, groups of rows with their errors, and the Misses that a verdict's
margin is read from. `check` reads it, so it must import neither torch nor what prints; it reads plain JSON, so that
runs of an earlier version count too.
"""

import json
import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.oomguard import Miss, Misses, tensors_bytes
from train.spec import Spec

NEWEST_RUNS = 200
"""Run folders that are read, at most: older runs were predicted by older formulas."""
_ACCEPTED = ("fits", "tight")
_ENDED = re.compile(r"(?:report|exit)\.(\d+)\.json")
# What the kernel does to a CPU rank that takes more than there is; nobody else's SIGKILL can be told from it.
_KILLED = "killed by SIGKILL."


class Row(Spec):
    """One attempt of one run that ended with a measured peak, or out of memory."""

    run: str
    attempt: int
    method: str
    """Of the estimate."""
    device_kind: str
    policy: str
    """ckpt.policy."""
    verdict: str
    usable_bytes: int | None
    """What the verdict compared with."""
    predicted_bytes: int | None
    """Peak of one device; null: nobody could tell."""
    tensors_bytes: int | None
    """Of the predicted peak, without context, NCCL and workspace; null where the plan has no terms of it."""
    measured_bytes: int | None
    """The same measured, on rank 0; null where it ended out of memory."""
    out_of_memory: bool

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None without both."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def false_accept(self) -> bool:
        """Accepted, and it took more than it was judged by or ended out of memory."""
        if self.verdict not in _ACCEPTED or self.usable_bytes is None:
            return False
        return self.out_of_memory or (self.measured_bytes is not None and self.measured_bytes > self.usable_bytes)

    @property
    def false_refusal(self) -> bool:
        """Judged not to fit, started all the same, and it did fit."""
        if self.verdict != "does_not_fit" or self.usable_bytes is None or self.out_of_memory:
            return False
        return self.measured_bytes is not None and self.measured_bytes <= self.usable_bytes


class Group(Spec):
    """Rows of one method, one kind of device and one policy."""

    method: str
    device_kind: str
    policy: str
    runs: int
    """Rows with a predicted and a measured peak."""
    no_prediction: int
    """Rows that were measured and that nobody predicted."""
    median_absolute_error: float | None
    """Half of the rows are off by no more, to either side; the error of a row is predicted / measured - 1."""
    p95_error: float | None
    """The error that 95 % of the rows do not pass by absolute value, with its sign."""
    worst_error: float | None
    """The error that is largest by absolute value, with its sign."""
    bias: float | None
    """The median of the errors with their signs; above 0: predicted too much."""
    false_accepts: int
    false_refusals: int


def read(runs_dir: Path) -> tuple[Row, ...]:
    """Rows of the newest 200 run folders, oldest first; what is damaged, unfinished or not measured is left out."""
    try:
        entries = [entry for entry in os.scandir(runs_dir) if not entry.name.startswith(".")]
    except OSError:  # no runs yet
        return ()
    dated: list[tuple[float, str, str]] = []
    for entry in entries:
        try:
            dated.append((os.stat(f"{entry.path}/spec.json").st_mtime, entry.name, entry.path))
        except OSError:
            continue  # no run folder
    rows: list[Row] = []
    for _, name, path in sorted(dated)[-NEWEST_RUNS:]:
        rows += _rows_of(name, path)
    return tuple(rows)


def misses(rows: Iterable[Row], method: str, device_kind: str) -> Misses:
    """What the rows of this method and kind of device say of its next prediction, policies together."""
    mine = [row for row in rows if (row.method, row.device_kind) == (method, device_kind)]
    return Misses(
        rows=tuple(
            Miss(tensors_bytes=row.tensors_bytes, share=(row.measured_bytes - row.predicted_bytes) / row.tensors_bytes)
            for row in mine
            if row.predicted_bytes and row.measured_bytes and row.tensors_bytes
        ),
        out_of_memory=sum(row.out_of_memory and row.verdict in _ACCEPTED for row in mine),
    )


def groups(rows: Iterable[Row]) -> tuple[Group, ...]:
    """Rows by method, kind of device and policy, in that order."""
    together: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        together[row.method, row.device_kind, row.policy].append(row)
    return tuple(_group(key, together[key]) for key in sorted(together))


def _group(key: tuple[str, str, str], rows: list[Row]) -> Group:
    errors = sorted((row.error for row in rows if row.error is not None), key=abs)
    return Group(
        method=key[0],
        device_kind=key[1],
        policy=key[2],
        runs=len(errors),
        no_prediction=sum(row.predicted_bytes is None for row in rows),
        median_absolute_error=statistics.median(map(abs, errors)) if errors else None,
        p95_error=errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        worst_error=errors[-1] if errors else None,
        bias=statistics.median(errors) if errors else None,
        false_accepts=sum(row.false_accept for row in rows),
        false_refusals=sum(row.false_refusal for row in rows),
    )


def _rows_of(name: str, path: str) -> list[Row]:
    """The attempts of a run that ended; each has the plan that it was started with."""
    files = set(os.listdir(path))
    attempts = sorted({int(ended[1]) for file in files if (ended := _ENDED.fullmatch(file))})
    if not attempts:
        return []
    try:
        train = _json(f"{path}/spec.json")["train"]
        found = [_row(name, path, files, train, attempt) for attempt in attempts]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # damaged; `runs` says so
    return [row for row in found if row is not None]


def _row(name: str, path: str, files: set[str], train: dict[str, Any], attempt: int) -> Row | None:
    """None where the attempt has no measured peak and did not end out of memory."""
    kept = f"plan.{attempt}.json"  # set aside when a later attempt was started
    plan = _json(f"{path}/{kept if kept in files else 'plan.json'}")
    report = _json(f"{path}/report.{attempt}.json") if f"report.{attempt}.json" in files else None
    ended = _json(f"{path}/exit.{attempt}.json") if f"exit.{attempt}.json" in files else None
    measured = None if report is None or not _steady(report) else report["measured_peak_bytes"]
    on_cpu = train["device"]["kind"] == "cpu"
    out_of_memory = ended is not None and (
        ended["cause"] == "out_of_memory" or (on_cpu and ended["cause"] == "rank_failed" and _KILLED in ended["detail"])
    )
    if measured is None and not out_of_memory:
        return None
    predicted, terms = plan["estimate"]["peak_device_bytes"], plan["estimate"].get("terms")
    return Row(
        run=name,
        attempt=attempt,
        method=plan["estimate"]["method"],
        device_kind=train["device"]["kind"],
        policy=train["ckpt"]["policy"],
        verdict=plan["verdict"],
        usable_bytes=plan["device"]["usable_bytes"],
        predicted_bytes=predicted,
        tensors_bytes=None if predicted is None or not terms else tensors_bytes(predicted, terms),
        measured_bytes=None if out_of_memory else measured,
        out_of_memory=out_of_memory,
    )


def _steady(report: dict[str, Any]) -> bool:
    """Whether the attempt came as far as the prediction speaks of: AdamW's states are made in a run's first step."""
    made_steps = report["first_loss"] is not None
    return made_steps and (report["attempt"] > 1 or report["steps"] > 1)


def _json(path: str) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read())
