"""What `check` and `run` print of a plan: JSON for programs, a few lines for people.

Takes a RunSpec and its Plan, gives a dictionary or text; prints nothing itself.
"""

from typing import Any

from orchestrator.oomguard import gib
from orchestrator.planner import Alternative, Plan
from orchestrator.spec import RunSpec

MIB = 1024**2
_PHASES = {"optimizer_step": "optimizer step"}


def as_json(spec: RunSpec, plan: Plan) -> dict[str, Any]:
    """The object of output=json; plan.json in the run folder. Bytes; null where nobody can know."""
    verdict = plan.verdict
    estimate = verdict.estimate.model_dump(mode="json")
    return {
        "choices": spec.choices,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "device": {
            "name": spec.train.device.name,
            "usable_bytes": verdict.usable_bytes,
            "context_bytes": spec.train.device.context_bytes,
        },
        "estimate": estimate | {"margin_bytes": verdict.margin_bytes},
        "alternatives": [alternative.model_dump(mode="json") for alternative in plan.alternatives],
        "budget": plan.budget.model_dump(mode="json") | {"over_budget": plan.over_budget},
        "notes": list(plan.notes),
    }


def as_text(spec: RunSpec, plan: Plan) -> str:
    """The verdict first, then what would fit, then what the peak is made of."""
    verdict, estimate = plan.verdict, plan.verdict.estimate
    lines = [f"{spec.name} on {spec.train.device.name}", verdict.reason]
    if plan.over_budget is not None:
        lines.append(f"over budget: {plan.over_budget}")
    lines += _alternatives(spec, plan)
    if verdict.verdict == "unknown":
        allowed = spec.oomguard.allow_unknown
        lines.append(
            "runs all the same, by oomguard.allow_unknown=true"
            if allowed
            else "refused, because a guess would be worse; oomguard.allow_unknown=true runs it all the same"
        )
    if estimate.peak_device_bytes is not None:
        terms = sorted(((v, n) for n, v in estimate.terms.items() if v and v >= MIB), reverse=True)
        lines.append("peak      " + ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for value, name in terms))
        phases = ((name, value) for name, value in estimate.phases.items() if value is not None)
        lines.append("phases    " + ", ".join(f"{_PHASES.get(n, n)} {gib(v)}" for n, v in phases))
        if estimate.recompute_flops_fraction:
            lines.append(f"recompute +{estimate.recompute_flops_fraction:.0%} FLOPs a step")
    lines += [f"assumed   {note}" for note in plan.notes]
    return "\n".join(lines)


def _alternatives(spec: RunSpec, plan: Plan) -> list[str]:
    if plan.verdict.verdict == "does_not_fit" and not plan.alternatives:
        more = " and more devices" if spec.train.device.kind == "cuda" else ""
        return [
            f"nothing was found that fits: recomputing all blocks and micro-batches of 1{more} were tried, within the "
            "budget. Set a smaller model or train.seq_len."
        ]
    word = "more room with" if plan.verdict.verdict == "tight" else "fits with"
    return [f"{word:<14} {_one(alternative)}" for alternative in plan.alternatives]


def _one(alternative: Alternative) -> str:
    facts = [gib(alternative.peak_device_bytes)]
    if alternative.recompute_flops_fraction:
        facts.append(f"+{alternative.recompute_flops_fraction:.0%} FLOPs")
    if alternative.verdict == "tight":
        facts.append("tight")
    return f"{' '.join(alternative.overrides)}  ({', '.join(facts)})"
