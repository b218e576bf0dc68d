"""The pre-flight of one run: device, estimate, verdict, plan.

Takes a RunSpec, gives the spec with the device it will really see, and its Plan. It must not import torch.
"""

from orchestrator import oomguard, planner
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


def judge(spec: RunSpec) -> tuple[RunSpec, Plan]:
    """Device, estimate, verdict, plan: the pre-flight of one run."""
    seen = spec.model_copy(update={"train": resolve(spec.train)})
    verdict = oomguard.judge(seen.train, estimate(seen.train), seen.train.device.usable_bytes)
    return seen, planner.plan(seen, verdict)


def verdict_code(spec: RunSpec, plan: Plan) -> ExitCode:
    """The exit code of a plan: what keeps it from being started, or 0."""
    if plan.verdict.verdict == "unknown" and spec.oomguard.allow_unknown:
        code = ExitCode.DONE
    else:
        code = _BY_VERDICT[plan.verdict.verdict]
    if code is ExitCode.DONE and plan.over_budget is not None:
        return ExitCode.OVER_BUDGET
    return code
