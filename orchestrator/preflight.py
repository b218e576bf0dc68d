"""The pre-flight of one run: device, estimate, verdict, plan.

Takes a RunSpec and the rows of finished runs, gives the spec with the device it will really see, and its Plan. It must
not import torch.
"""

from collections.abc import Sequence

from orchestrator import accuracy, oomguard, planner
from orchestrator.accuracy import Row
from orchestrator.device import resolve
from orchestrator.errors import ExitCode
from orchestrator.memory.formula import estimate
from orchestrator.planner import Plan
from orchestrator.spec import RunSpec

_BY_VERDICT = {
    "fits": ExitCode.DONE,
    "tight": ExitCode.DONE,
    "does_not_fit": ExitCode.DOES_NOT_FIT,
    "unknown": ExitCode.CANNOT_TELL,
}


def judge(spec: RunSpec, rows: Sequence[Row] = ()) -> tuple[RunSpec, Plan]:
    """Device, estimate, verdict, plan: the pre-flight of one run.

    `rows` are finished runs of any method and device (accuracy.read), of which the verdict's margin is read.
    """
    seen = spec.model_copy(update={"train": resolve(spec.train)})
    predicted = estimate(seen.train)
    misses = accuracy.misses(rows, predicted.method, seen.train.device.kind)
    verdict = oomguard.judge(seen.train, predicted, seen.train.device.usable_bytes, misses)
    return seen, planner.plan(seen, verdict, misses)


def verdict_code(spec: RunSpec, plan: Plan) -> ExitCode:
    """The exit code of a plan: what keeps it from being started, or 0."""
    code = ExitCode.DONE if overridden(spec, plan) is not None else _BY_VERDICT[plan.verdict.verdict]
    if code is ExitCode.DONE and plan.over_budget is not None:
        return ExitCode.OVER_BUDGET
    return code


def overridden(spec: RunSpec, plan: Plan) -> str | None:
    """The setting by which the run starts against its verdict, as typed; None where it needs none or has none."""
    guard, verdict = spec.oomguard, plan.verdict.verdict
    if verdict == "unknown" and guard.allow_unknown:
        return "oomguard.allow_unknown=true"
    if verdict in ("unknown", "does_not_fit") and not guard.enforce:
        return "oomguard.enforce=false"
    return None
