"""One wandb run, written from the run folder: `python -m orchestrator.wandb_sidecar RUN_DIR ATTEMPT auto|offline`.

Reads spec.json, plan.json, steps.jsonl and the report, until its stdin is closed: training has then ended. Prints
WriterState lines on stdout; all else goes to stderr. One process a run, for a second wandb.init returns the first
run. It must not import torch.
"""

import json
import os
import secrets
import select
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.spec import RunSpec
from orchestrator.tracking import WANDB_ID_FILE, Mode, WriterState
from train.report import STEPS_FILE, read_report

METRICS = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "train/tokens": "tokens",
    "eval/loss": "eval_loss",
    "eval/nats_per_byte": "eval_nats_per_byte",
    "perf/tokens_per_s": "tokens_per_s",
    "perf/step_time_s": "step_time_s",
    "perf/mfu": "mfu",
    "mem/peak_allocated_bytes": "peak_allocated_bytes",
    "mem/peak_reserved_bytes": "peak_reserved_bytes",
    "mem/rss_growth_bytes": "rss_growth_bytes",
    "mem/peak_device_bytes": "peak_device_bytes",
}
"""Name in wandb, and the field of StepReport that it shows."""
_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""Our word for each mode of wandb."""
_STEP = "global_step"
_MAX_TAG_CHARS = 64
_POLL_S = 0.25


def write(run_dir: Path, attempt: int, offline: bool, say: Callable[[WriterState], None]) -> None:
    """Write an attempt to wandb as it goes on, until stdin is closed; raises whatever wandb raises."""
    spec = RunSpec.model_validate_json((run_dir / "spec.json").read_text(encoding="utf-8"))
    run_id = wandb_id(run_dir, os.environ.get("WANDB_RUN_ID"))
    os.environ.update(wandb_environment(spec, run_dir, run_id, os.environ))
    import wandb  # late: its settings come from the environment set above, and it may be missing or broken
    from wandb.sdk import wandb_setup  # late, as wandb itself

    # Not wandb.setup(): that starts wandb-core, and waits for its own lock for ever when it cannot (0.31.0).
    settings = wandb_setup.singleton().settings
    mode: Mode = "offline" if offline else _MODES[settings.mode]
    # Said before a key is looked for: a malformed one raises, and was meant to go online.
    say(WriterState(mode=mode, folder=None, url=None, problem=None))
    if mode == "online" and "WANDB_MODE" not in os.environ and not _has_credentials(settings.base_url):
        mode = "offline"
        say(WriterState(mode=mode, folder=None, url=None, problem=None))
    forced = mode if mode == "offline" else None
    run = wandb.init(config=config(spec), allow_val_change=True, mode=forced)
    run.define_metric(_STEP)
    run.define_metric("*", step_metric=_STEP)
    folder = None if mode == "disabled" else str(Path(run.settings.sync_dir))
    say(WriterState(mode=mode, folder=folder, url=run.url, problem=None))
    for line in follow_lines(run_dir / STEPS_FILE, _stdin_closed):
        values = metrics(line, attempt)
        if values is not None:
            run.log(values)
    run.summary.update(peaks(run_dir, attempt))
    run.finish(exit_code=0 if read_report(run_dir, attempt) is not None else 1)
    wandb.teardown()  # else wandb-core outlives us a little


def config(spec: RunSpec) -> dict[str, Any]:
    """The whole resolved config, with the trainer's groups at the top as on the command line."""
    content = spec.model_dump(mode="json")
    groups: dict[str, Any] = content.pop("train")
    return content | groups


def wandb_environment(spec: RunSpec, run_dir: Path, run_id: str, env: Mapping[str, str]) -> dict[str, str]:
    """Our settings as WANDB_* variables, without those that `env` sets: the user's own win."""
    ours = {
        "WANDB_PROJECT": spec.tracking.project,
        "WANDB_ENTITY": spec.tracking.entity,
        "WANDB_RUN_GROUP": spec.tracking.group,
        "WANDB_NAME": spec.name,
        "WANDB_TAGS": ",".join(tags(spec)),
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
        "WANDB_DIR": str(run_dir),
        "WANDB_INIT_TIMEOUT": str(spec.tracking.timeout_s / 2),
        # What the run folder has already, or what would cost the training time.
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_LABEL_DISABLE": "true",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_X_SAVE_REQUIREMENTS": "false",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_QUIET": "true",
    }
    return {name: value for name, value in ours.items() if value is not None and name not in env}


def tags(spec: RunSpec) -> tuple[str, ...]:
    """The user's tags, then the group choices; wandb takes 64 characters at most and parts them at commas."""
    wanted = [*spec.tracking.tags, *(f"{group}={choice}" for group, choice in spec.choices.items())]
    return tuple(tag for tag in dict.fromkeys(wanted) if 0 < len(tag) <= _MAX_TAG_CHARS)


def wandb_id(run_dir: Path, wanted: str | None) -> str:
    """The id that the run keeps over its attempts: the one asked for, else the one in wandb_id, made if needed."""
    path = run_dir / WANDB_ID_FILE
    made = wanted or "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made + "\n")
    except FileExistsError:
        return wanted or path.read_text(encoding="utf-8").strip()
    return made


def metrics(line: bytes, attempt: int) -> dict[str, float] | None:
    """What is logged of a line of steps.jsonl; None for another attempt's, and for half of one."""
    try:
        step = json.loads(line)
    except ValueError:
        return None  # the half line of a killed writer, ended by the next attempt
    if step["attempt"] != attempt:
        return None
    values = {name: step.get(field) for name, field in METRICS.items()}
    return {_STEP: step["step"]} | {name: value for name, value in values.items() if value is not None}


def peaks(run_dir: Path, attempt: int) -> dict[str, float]:
    """Predicted peak, measured peak and the relative error of the prediction, as far as they are known."""
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    predicted = (plan.get("estimate") or {}).get("peak_device_bytes")
    report = read_report(run_dir, attempt)
    measured = None if report is None else report.measured_peak_bytes
    known = {"mem/predicted_peak_bytes": predicted, "mem/measured_peak_bytes": measured}
    # On cuda the measured peak has what the allocator holds idle, which the predicted one leaves to the margin.
    if predicted is not None and measured and plan["estimate"].get("peak_reserved_bytes", 0) is not None:
        known["mem/prediction_error"] = (predicted - measured) / measured
    return {name: value for name, value in known.items() if value is not None}


def follow_lines(path: Path, over: Callable[[float], bool]) -> Iterator[bytes]:
    """Complete lines of a file that may not be there yet, until `over` and all are read; `over` waits a while."""
    offset = 0
    ended = False
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                complete = file.read().rpartition(b"\n")
            offset += len(complete[0]) + len(complete[1])
            yield from (line for line in complete[0].split(b"\n") if line)
        if ended:
            return
        ended = over(_POLL_S)


def _stdin_closed(wait_s: float) -> bool:
    """Whether the supervisor closed our stdin, or is dead; waits so long for it."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def _has_credentials(host: str) -> bool:
    """Whether wandb finds a key for this server by itself: variable, netrc, settings; it does not ask."""
    from wandb.sdk.lib import wbauth  # late, as wandb itself

    return wbauth.authenticate_session(host=host, source="orchestrator", prompt=False) is not None


def _main() -> int:
    states = os.dup(1)
    os.dup2(2, 1)  # what wandb prints must not get among the states
    last = WriterState(mode=None, folder=None, url=None, problem=None)

    def say(state: WriterState) -> None:
        nonlocal last
        last = state
        os.write(states, state.model_dump_json().encode() + b"\n")

    try:
        write(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "offline", say)
    except Exception as error:  # noqa: BLE001 - whatever wandb raises is told to the supervisor, which decides
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        say(last.model_copy(update={"problem": line.rstrip(".")}))
        return 1
    return 0


if __name__ == "__main__":
    code = _main()
    sys.stderr.flush()
    os._exit(code)  # wandb's exit handlers may wait for a server that does not answer
