"""What `check` and `run` print of a plan: JSON for programs, a few lines for people.

Takes a RunSpec and its Plan, gives a dictionary or text; prints nothing itself.
"""

from typing import Any

from orchestrator.planner import Alternative, Plan
from orchestrator.preflight import overridden
from orchestrator.spec import RunSpec
from orchestrator.units import MIB, gib

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
        "estimate": estimate | {"margin_bytes": verdict.margin_bytes, "margin_source": verdict.margin_source},
        "alternatives": [alternative.model_dump(mode="json") for alternative in plan.alternatives],
        "largest_micro_batch": plan.largest_micro_batch,
        "checkpointing": None if plan.checkpointing is None else plan.checkpointing.model_dump(mode="json"),
        "budget": plan.budget.model_dump(mode="json") | {"over_budget": plan.over_budget},
        "notes": list(plan.notes),
    }


def as_text(spec: RunSpec, plan: Plan) -> str:
    """The verdict first, then what would fit, then what the peak is made of."""
    verdict, estimate = plan.verdict, plan.verdict.estimate
    lines = [f"{spec.name} on {spec.train.device.name}", verdict.reason]
    if plan.over_budget is not None:
        lines.append(f"over budget: {plan.over_budget}")
    all_the_same = overridden(spec, plan)
    if all_the_same is not None:
        lines.append(f"starts all the same, by {all_the_same}")
    elif verdict.verdict == "unknown":
        lines.append("refused, because a guess would be worse; oomguard.allow_unknown=true runs it all the same")
    lines += _alternatives(plan)
    if plan.largest_micro_batch is not None:
        lines.append(
            f"room      up to train.micro_batch={plan.largest_micro_batch} fits with its margin, all else as it is"
        )
    if plan.checkpointing is not None:
        lines.append(f"ckpt      {plan.checkpointing.note}")
    if estimate.peak_device_bytes is not None:
        terms = sorted(((v, n) for n, v in estimate.terms.items() if v and v >= MIB), reverse=True)
        lines.append("peak      " + ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for value, name in terms))
        phases = ((name, value) for name, value in estimate.phases.items() if value is not None)
        lines.append("phases    tensors alone: " + ", ".join(f"{_PHASES.get(n, n)} {gib(v)}" for n, v in phases))
        if estimate.recompute_flops_fraction:
            lines.append(f"recompute +{estimate.recompute_flops_fraction:.0%} FLOPs a step")
    lines += [f"assumed   {note}" for note in plan.notes]
    return "\n".join(lines)


def _alternatives(plan: Plan) -> list[str]:
    if plan.verdict.verdict == "does_not_fit" and not plan.alternatives:
        *others, last = ("", *plan.tried)
        tried = f"{', '.join(others[1:])} and {last}" if others[1:] else last
        what = f": tried {tried}, within" if tried else " within"
        more = "Set more devices (parallel.devices_per_node, parallel.nodes), a smaller model or train.seq_len."
        return [f"nothing was found that fits{what} the budget and at the tokens of a step. {more}"]
    word = "more room with" if plan.verdict.verdict == "tight" else "fits with"
    return [f"{word:<14} {_one(alternative)}" for alternative in plan.alternatives]


def _one(alternative: Alternative) -> str:
    facts = [gib(alternative.peak_device_bytes)]
    if alternative.recompute_flops_fraction:
        facts.append(f"+{alternative.recompute_flops_fraction:.0%} FLOPs")
    if alternative.verdict == "tight":
        facts.append("tight")
    return f"{' '.join(alternative.overrides)}  ({', '.join(facts)})"
