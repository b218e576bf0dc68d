"""Run folders as the launcher, the watcher and the trainer leave them, written file by file.

Takes a folder and what is to be special, gives the record that was written. For what reads such folders.
"""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.ledger import ExitRecord, NodeRecord, Submission, this_process, write
from orchestrator.spec import RunSpec
from tests.specs import run_spec
from train.report import STEPS_FILE, StepReport, TrainReport, append_step, write_json

PREDICTED, MEASURED = 3 * 1024**3, 2 * 1024**3


def planned(run_dir: Path, *overrides: str) -> RunSpec:
    """A claimed folder: spec.json and plan.json, nothing started."""
    run_dir.mkdir(parents=True)
    spec = _composed(*overrides)
    launch = spec.launch.model_copy(update={"runs_dir": str(run_dir.parent)})
    spec = spec.model_copy(update={"name": run_dir.name, "launch": launch})
    write(run_dir / "spec.json", spec)
    write_json(run_dir / "plan.json", json.dumps({"estimate": {"peak_device_bytes": PREDICTED}}))
    return spec


@cache
def _composed(*overrides: str) -> RunSpec:
    return run_spec("model=tiny", "device=cpu", "data=stdlib", "tracking=none", *overrides)


def submission(run_dir: Path, **changes: Any) -> Submission:
    """submission.json of attempt 1, submitted a moment ago."""
    known: dict[str, Any] = {
        "attempt": 1,
        "kind": "local",
        "submitted_at": time.time(),
        "command": ("python", "-m", "orchestrator", "model=tiny"),
        "job_id": "4242",
        "commit": "c0ffee",
        "dirty": True,
        "code": str(run_dir.parent / ".code" / "0123"),
        "candidates": ("cpu:0", "cpu:1"),
        "leases": 2,
        "threads_per_rank": 2,
    }
    record = Submission.model_validate(known | changes)
    write(run_dir / "submission.json", record)
    return record


def node(run_dir: Path, attempt: int = 1, **changes: Any) -> NodeRecord:
    """node.<attempt>.json: this very process as the watcher of one rank, so it is alive."""
    record = this_process(("cpu:0", "cpu:1"), (1,)).model_copy(update=changes)
    write(run_dir / f"node.{attempt}.json", record)
    return record


def dead_node(run_dir: Path, attempt: int = 1) -> NodeRecord:
    """A watcher whose process is gone: its number now belongs to one that started later."""
    return node(run_dir, attempt, process_start=this_process().process_start - 1000.0)


def exit_record(run_dir: Path, attempt: int = 1, **changes: Any) -> ExitRecord:
    """exit.<attempt>.json: completed."""
    known: dict[str, Any] = {
        "cause": "completed",
        "exit_code": 0,
        "detail": "Ended after step 3: budget.max_steps=3.",
        "first_failed_rank": None,
        "last_lines": (),
        "ended_at": time.time(),
    }
    record = ExitRecord.model_validate(known | changes)
    write(run_dir / f"exit.{attempt}.json", record)
    return record


def step(run_dir: Path, number: int, attempt: int = 1, **changes: Any) -> StepReport:
    """One more line of steps.jsonl; the loss is 6 / step."""
    known = {
        "attempt": attempt,
        "step": number,
        "tokens": number * 512,
        "loss": 6.0 / number,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "step_time_s": 0.1,
        "tokens_per_s": 5120.0,
        "rss_growth_bytes": 900,
        "peak_device_bytes": MEASURED,
        "wall_time_s": number * 0.1,
    }
    report = StepReport.model_validate(dict.fromkeys(StepReport.model_fields) | known | changes)
    append_step(run_dir / STEPS_FILE, report)
    return report


def train_report(run_dir: Path, attempt: int = 1, **changes: Any) -> TrainReport:
    """report.<attempt>.json: completed after step 3."""
    known = {
        "attempt": attempt,
        "outcome": "completed",
        "stop_reason": "budget.max_steps=3",
        "steps": 3,
        "tokens": 1536,
        "first_loss": 6.0,
        "final_loss": 2.0,
        "final_eval_loss": 2.1,
        "final_eval_nats_per_byte": 2.1,
        "predicted_peak_bytes": PREDICTED,
        "measured_peak_bytes": MEASURED,
        "tokens_per_s": 5120.0,
        "wall_time_s": 0.3,
        "device_hours": 0.001,
        "data_fingerprint": "d",
        "eval_fingerprint": "e",
        "torch_version": "2.0",
        "world_size": 1,
    }
    report = TrainReport.model_validate(dict.fromkeys(TrainReport.model_fields) | known | changes)
    write_json(run_dir / f"report.{attempt}.json", report.model_dump_json())
    return report


def failure(run_dir: Path, rank: int, at: float, message: str, attempt: int = 1, **changes: Any) -> None:
    """failure.<attempt>.rank<r>.json, as train.rank leaves it."""
    known = {
        "rank": rank,
        "time": at,
        "kind": "RuntimeError",
        "message": message,
        "explained": False,
        "out_of_memory": False,
    }
    write_json(run_dir / f"failure.{attempt}.rank{rank}.json", json.dumps(known | changes))


def rank_log(run_dir: Path, rank: int, text: str, attempt: int = 1) -> None:
    """What a rank printed."""
    (run_dir / "logs").mkdir(exist_ok=True)
    with (run_dir / "logs" / f"attempt{attempt}.rank{rank}.log").open("a", encoding="utf-8") as log:
        log.write(text)
