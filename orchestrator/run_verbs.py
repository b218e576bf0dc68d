"""Verbs that take run names: runs, show, logs, wait, cancel, resume, accuracy.

Takes words from the command line, gives an exit code; works from any shell, on run folders alone.
"""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from orchestrator import accuracy as measured
from orchestrator import ledger
from orchestrator.accuracy import Row
from orchestrator.errors import ConfigError, ExitCode
from orchestrator.launch import follow, node
from orchestrator.ledger import RunRecord
from orchestrator.oomguard import LEAST_ROWS
from orchestrator.resume import resume_run
from orchestrator.start import exit_code
from orchestrator.units import gib
from train.spec import Problem

_TABLE_WIDTH = 140
"""Columns at least: a run's name that is cut is of no use."""
_POLL_S = 0.1
_WATCHER_START_S = 20.0
_SLACK_S = 10.0
"""What a watcher may take beyond launch.cancel_timeout_s before it is killed itself."""
_RUNS_DIR = click.option(
    "--runs-dir",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of run folders (launch.runs_dir).",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def run_verbs(verb: str, words: list[str]) -> int:
    """Exit code of one of these verbs; raises OrchestratorError."""
    try:
        result = _VERBS[verb].main(args=words, prog_name=f"python -m orchestrator {verb}", standalone_mode=False)
    except click.ClickException as error:
        raise ConfigError([f"{error.format_message()} (python -m orchestrator {verb} --help)"]) from error
    except click.Abort:
        raise KeyboardInterrupt from None
    return int(result or 0)


def _print(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _summary(record: RunRecord) -> dict[str, object]:
    step, report = record.last_step, record.report
    return {
        "name": record.name,
        "state": record.state,
        "attempt": record.attempt,
        "step": None if step is None else step.step,
        "loss": None if step is None else step.loss,
        "eval_nats_per_byte": None if report is None else report.final_eval_nats_per_byte,
        "predicted_peak_bytes": record.predicted_peak_bytes,
        "measured_peak_bytes": record.measured_peak_bytes,
        "run_dir": str(record.run_dir),
    }


@click.command(help="List the runs of a folder, oldest first.")
@_RUNS_DIR
@_JSON
def runs(runs_dir: Path, as_json: bool) -> int:
    records: list[RunRecord] = []
    problems: list[Problem | str] = []
    for path in ledger.run_dirs(runs_dir):
        try:
            records.append(ledger.read(path.resolve()))
        except ConfigError as error:  # said when the others are listed
            problems += error.problems
    if as_json:
        print(json.dumps([_summary(record) for record in records], indent=2))
    elif records:
        Console(width=max(Console().width, _TABLE_WIDTH)).print(_table(records))
    elif not problems:
        _print(f"no runs in {runs_dir.resolve()}")
    if problems:
        raise ConfigError(problems)
    return 0


def _table(records: list[RunRecord]) -> Table:
    table = Table(Column("run", no_wrap=True), "state", "step", "loss", "predicted peak", "measured peak", box=None)
    for record in records:
        row = _summary(record)
        table.add_row(
            record.name,
            record.state,
            "" if row["step"] is None else str(row["step"]),
            "" if record.last_step is None else f"{record.last_step.loss:.3f}",
            follow.size(record.predicted_peak_bytes),
            follow.size(record.measured_peak_bytes),
        )
    return table


@click.command(help="What a run is, how it stands or ended, and where its files are.")
@click.argument("run")
@_RUNS_DIR
@_JSON
def show(run: str, runs_dir: Path, as_json: bool) -> int:
    record = ledger.find(run, runs_dir)
    if as_json:
        facts = {
            "spec": record.spec.model_dump(mode="json"),
            "plan": record.plan,
            "submission": None if record.submission is None else record.submission.model_dump(mode="json"),
            "exit": None if record.exit is None else record.exit.model_dump(mode="json"),
            "report": None if record.report is None else record.report.model_dump(mode="json"),
        }
        print(json.dumps(_summary(record) | facts, indent=2))
        return 0
    _print(follow.ending(record))
    submission = record.submission
    if submission is not None:
        tree = "a dirty tree on commit " if submission.dirty else "commit "
        _print(f"  code            {submission.code} ({tree}{submission.commit or 'unknown: not in git'})")
        _print(f"  started with    {shlex.join(submission.command)}")
        _print(f"  attempt         {submission.attempt}, job {submission.job_id or 'in the launching process'}")
    if record.state == "running" and record.last_step is not None:
        _print(f"  step {record.last_step.step}: loss {record.last_step.loss:.4f}")
    return 0


@click.command(help="What the ranks of a run printed.")
@click.argument("run")
@click.option("-f", "--follow", "forever", is_flag=True, help="Go on until the run has ended.")
@click.option("--rank", default="0", show_default=True, help="A rank, or all.")
@_RUNS_DIR
def logs(run: str, forever: bool, rank: str, runs_dir: Path) -> int:
    record = ledger.find(run, runs_dir)
    world = record.spec.train.parallel.world_size
    if rank != "all" and not (rank.isdigit() and int(rank) < world):
        raise ConfigError([f"--rank={rank}: {record.name} has ranks 0 to {world - 1}. Set it to one of them or all."])
    ranks = range(world) if rank == "all" else [int(rank)]
    paths = [node.log_file(record.run_dir, record.attempt, r) for r in ranks]
    inline = record.submission is not None and record.submission.kind == "inline"
    if inline:
        _print(f"{record.name}: launch=inline prints to the terminal that it was started in, and keeps no log")
    elif not forever and not any(path.exists() for path in paths):
        _print(f"{record.name} ({record.state}): its ranks have printed nothing yet")
    follow.print_log(paths, lambda: ledger.read(record.run_dir).state not in ledger.ENDED, forever=forever)
    return 0


@click.command(help="Follow a run to its end; exits as the run did. Ctrl-C stops looking, not the run.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@_RUNS_DIR
def wait(names: tuple[str, ...], runs_dir: Path) -> int:
    codes = []
    for record in [ledger.find(name, runs_dir) for name in names]:
        ended = follow.follow(record.run_dir, Console())
        _print(follow.ending(ended))
        codes.append(exit_code(ended))
    return max(codes)


@click.command(help="Ask runs to stop with a checkpoint; kill those that do not in launch.cancel_timeout_s.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@_RUNS_DIR
def cancel(names: tuple[str, ...], runs_dir: Path) -> int:
    records = [ledger.find(name, runs_dir) for name in names]
    asked = [_ask_to_stop(record) for record in records]  # all, before one of them frees what another waits for
    for record in asked:
        if record is not None:
            _print(follow.ending(_stopped(record)))
    return ExitCode.DONE


def _ask_to_stop(record: RunRecord) -> RunRecord | None:
    """The run that was asked, None where there is nothing to cancel."""
    if record.state in (*ledger.ENDED, "planned"):
        why = "it was never started" if record.state == "planned" else f"{record.state} already"
        _print(f"{record.name}: {why}; nothing to cancel")
        return None
    deadline = time.monotonic() + _WATCHER_START_S
    while record.node is None and record.state not in ledger.ENDED and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # a cancel right after a submit
        record = ledger.read(record.run_dir)
    follow.ask_to_stop(record)
    return record


def _stopped(record: RunRecord) -> RunRecord:
    """The record at its end; killed where it takes longer than it may."""
    launch, tracking = record.spec.launch, record.spec.tracking
    deadline = time.monotonic() + launch.cancel_timeout_s + tracking.timeout_s + _SLACK_S
    while record.state not in ledger.ENDED:
        if time.monotonic() > deadline:
            follow.kill(record)
        time.sleep(_POLL_S)
        record = ledger.read(record.run_dir)
    return record


@click.command(
    help="Continue a run from its newest complete checkpoint. OVERRIDES may change parallel, budget, launch, "
    "checkpoint, tracking, oomguard, device.usable_bytes, train.micro_batch and train.grad_accum."
)
@click.argument("run")
@click.argument("overrides", nargs=-1)
@_RUNS_DIR
def resume(run: str, overrides: tuple[str, ...], runs_dir: Path) -> int:
    return resume_run(ledger.find(run, runs_dir), overrides)


@click.command(
    help="Predicted beside measured peak of the newest runs, by method, device kind and ckpt policy: error is "
    "predicted / measured - 1, median abs the median of it without its sign, bias with it. False accepts ended out of "
    "memory or took more than they were judged by; false refusals were judged not to fit, started by "
    "oomguard.enforce=false, and did fit. Tensors are the peak without context, NCCL and workspace."
)
@_RUNS_DIR
@_JSON
def accuracy(runs_dir: Path, as_json: bool) -> int:
    rows = measured.read(runs_dir)
    groups, margins = measured.groups(rows), _margins(rows)
    if as_json:
        print(json.dumps({"groups": [group.model_dump() for group in groups], "margins": margins}, indent=2))
        return 0
    if not groups:
        _print(f"no measured runs in {runs_dir.resolve()}")
        return 0
    names = ("method", "device", "ckpt", "runs", "median abs", "p95", "worst", "bias")
    counts = ("false accepts", "false refusals", "no prediction")
    table = Table(*names, *counts, box=None)
    for group in groups:
        off = "" if group.median_absolute_error is None else f"{group.median_absolute_error:.1%}"
        signed = (group.p95_error, group.worst_error, group.bias)
        told = (off, *("" if error is None else f"{error:+.1%}" for error in signed))
        of = (group.false_accepts, group.false_refusals, group.no_prediction)
        table.add_row(group.method, group.device_kind, group.policy, str(group.runs), *told, *map(str, of))
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    for margin in margins:
        kind = f"margin of {margin['method']} on {margin['device_kind']}"
        share, count, most = (margin[name] for name in ("largest_under_prediction", "runs", "measured_up_to_bytes"))
        source = (
            f"the documented bound ({count} of {LEAST_ROWS} runs)"
            if most is None
            else f"from these {count} runs for up to {gib(most)} of tensors, the documented bound above"
        )
        ended = most is not None and margin["out_of_memory"]
        bound = f"; at least the documented bound, as {ended} ended out of memory" if ended else ""
        _print(f"{kind}: {source}; largest under-prediction {share:.1%} of the tensors{bound}")
    return 0


def _margins(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a verdict's margin is read from, policies together."""
    found = []
    for method, kind in sorted({(row.method, row.device_kind) for row in rows}):
        misses = measured.misses(rows, method, kind)
        found.append(
            {
                "method": method,
                "device_kind": kind,
                "runs": len(misses.rows),
                "largest_under_prediction": max([0.0, *(row.share for row in misses.rows)]),
                "out_of_memory": misses.out_of_memory,
                "measured_up_to_bytes": misses.measured_up_to_bytes,
            }
        )
    return found


_VERBS = {
    "runs": runs,
    "show": show,
    "logs": logs,
    "wait": wait,
    "cancel": cancel,
    "resume": resume,
    "accuracy": accuracy,
}
