"""A further attempt of a run: same frozen config and code, perhaps other ranks or another budget.

Takes a RunRecord and overrides, gives an exit code. Tokens per optimizer step stay what they were.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator import accuracy, config, ledger, output
from orchestrator.errors import ConfigError, ExitCode, NotSubmittedError
from orchestrator.launch import folder, local
from orchestrator.ledger import RunRecord
from orchestrator.preflight import judge, overridden, verdict_code
from orchestrator.spec import RunSpec
from orchestrator.start import launch, prepare_data
from train.corpus import TOKENS_FILE, Corpus
from train.spec import Problem, as_typed

_MAY_CHANGE = (
    "parallel",
    "budget",
    "launch",
    "checkpoint",
    "tracking",
    "oomguard",
    "device.usable_bytes",
    "train.micro_batch",
    "train.grad_accum",
    "output",
)


def resume_run(record: RunRecord, overrides: Sequence[str]) -> int:
    """Judge, then start the next attempt and follow it; raises OrchestratorError."""
    _require_over(record)
    with folder.held(record.run_dir):
        return _resume(ledger.read(record.run_dir), overrides)


def _require_over(record: RunRecord) -> None:
    if record.state not in (*ledger.ENDED, "planned"):
        raise NotSubmittedError(f"{record.name} is {record.state}. Cancel it first: {ledger.command('cancel', record)}")


def _resume(record: RunRecord, overrides: Sequence[str]) -> int:
    _require_over(record)  # another shell may have resumed it meanwhile
    before = record.spec
    spec = config.change(before, overrides, _MAY_CHANGE)
    if spec.launch.runs_dir != before.launch.runs_dir:
        raise ConfigError(["launch.runs_dir: a run stays in its folder. Move the folder and name its path."])
    spec = keep_tokens_per_step(before, spec, [word.partition("=")[0] for word in overrides])
    # The folder may have been moved: runs_dir is where it is.
    launched = spec.launch.model_copy(update={"runs_dir": str(record.run_dir.parent)})
    spec = spec.model_copy(update={"launch": launched})
    if record.state == "completed" and spec.train.budget == before.train.budget:
        print(f"{record.name}: completed already ({record.exit.detail if record.exit else ''})")
        print("  to train it further, raise the limit that ended it, e.g. budget.max_steps=...")
        return ExitCode.DONE
    _require_steps_left(record, spec)
    judged, plan = judge(_as_chosen(spec, overrides), accuracy.read(record.run_dir.parent))
    code = verdict_code(judged, plan)
    if code is not ExitCode.DONE:
        print(output.as_text(judged, plan), file=sys.stderr)
        return code
    all_the_same = overridden(judged, plan)
    if all_the_same is not None:
        print(f"{all_the_same}: goes on in spite of the verdict ({plan.verdict.reason})", file=sys.stderr)
    local.check_machine(judged)
    folder.check_space(judged, record.run_dir)
    corpus = _corpus_of(record, judged)
    answer = output.as_json(judged, plan)
    done = checkpointed_step(record.run_dir)
    where = f"continues after step {done}" if done else "has no complete checkpoint and starts from the beginning"
    print(f"{record.name} {where}", file=sys.stderr if judged.output == "json" else sys.stdout)
    return launch(judged, record.run_dir, corpus, attempt=record.attempt + 1, plan=plan, answer=answer).exit_code


def _require_steps_left(record: RunRecord, spec: RunSpec) -> None:
    """Refuse a limit that the newest checkpoint has passed: nothing would be left to do or to report."""
    done, planned = checkpointed_step(record.run_dir), spec.train.planned_steps
    changed = spec.train.budget != record.spec.train.budget
    if planned is not None and (done > planned or (done == planned and changed)):
        budget = spec.train.budget
        key = "budget.max_steps" if budget.max_steps == planned else "budget.max_tokens"
        value = budget.max_steps if budget.max_steps == planned else budget.max_tokens
        why = f"{record.name} has made {done} steps, and this allows {planned}"
        raise ConfigError([Problem(key=key, value=str(value), why=why, fix="Set it higher")])


def checkpointed_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint, 0 where there is none."""
    found = (path.parent.name for path in (run_dir / "checkpoints").glob("step-*/.metadata"))
    return max((int(name.removeprefix("step-")) for name in found), default=0)


def _corpus_of(record: RunRecord, spec: RunSpec) -> Corpus:
    """The tokens that the run was started with; made again where they are gone, and refused where they differ then."""
    kept = record.run_dir / folder.CORPUS_FILE
    if not kept.exists():  # its launch was cut short
        return prepare_data(spec)
    before = Corpus.model_validate_json(kept.read_text(encoding="utf-8"))
    moved = record.run_dir.parent / ".data" / Path(before.folder).name
    for place in (Path(before.folder), moved):
        if (place / TOKENS_FILE).exists():
            return before.model_copy(update={"folder": str(place)})
    again = prepare_data(spec)
    if again.data_fingerprint != before.data_fingerprint:
        raise ConfigError(
            [
                f"data.path={as_typed(spec.train.data.path)}: {record.name} was trained on other tokens (fingerprint "
                f"{before.data_fingerprint[:12]}, now {again.data_fingerprint[:12]}). Restore the files, or start a "
                "new run."
            ]
        )
    return again


def _as_chosen(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    """The spec with the device as it was chosen: what was read from the machine is read again."""
    device = spec.train.device
    typed = any(word.startswith("device.usable_bytes=") for word in (*spec.overrides, *overrides))
    if typed or spec.choices.get("device") not in ("auto", "cpu"):
        return spec
    kind = "auto" if spec.choices["device"] == "auto" else "cpu"
    again = device.model_copy(update={"kind": kind, "usable_bytes": None})
    return spec.model_copy(update={"train": spec.train.model_copy(update={"device": again})})


def keep_tokens_per_step(before: RunSpec, spec: RunSpec, typed: Sequence[str]) -> RunSpec:
    """The spec with as many sequences per optimizer step as before: train.grad_accum makes up for other ranks.

    What was typed is kept. Raises ConfigError where no whole number of accumulations does it.
    """
    wanted, now = before.train.sequences_per_step, spec.train.sequences_per_step
    if wanted == now:
        return spec
    loop, ranks = spec.train.train, spec.train.parallel.world_size
    accum, rest = divmod(wanted, loop.micro_batch * ranks)
    if rest or accum == 0 or "train.grad_accum" in typed:
        choices = [m for m in range(1, wanted // ranks + 1) if wanted % (m * ranks) == 0]
        fits = ", ".join(f"train.micro_batch={m} train.grad_accum={wanted // (m * ranks)}" for m in choices[-3:])
        fix = f"Set {fits}" if fits else f"Use a number of ranks that divides {wanted}"
        raise ConfigError(
            [
                Problem(
                    key="parallel.devices_per_node",
                    value=str(spec.train.parallel.devices_per_node),
                    why=f"an optimizer step of this run has {wanted} sequences, and train.micro_batch="
                    f"{loop.micro_batch} train.grad_accum={loop.grad_accum} on {ranks} ranks makes {now}",
                    fix=fix,
                )
            ]
        )
    train = spec.train.model_copy(update={"train": loop.model_copy(update={"grad_accum": accum})})
    print(f"train.grad_accum={accum}: keeps {wanted} sequences per optimizer step with {ranks} rank(s)")
    return spec.model_copy(update={"train": train})
