"""The command line: which verb, in which order the stages run, and the exit code.

`python -m orchestrator [VERB] ...`; `run` and `check` take a config and go through Hydra, the others take run names.
It puts the chain in order, with preflight.py and start.py. It must not import torch.
"""

import json
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from orchestrator import accuracy, config, output
from orchestrator.accuracy import Row
from orchestrator.errors import ConfigError, ExitCode, OrchestratorError
from orchestrator.preflight import judge, overridden, verdict_code
from orchestrator.spec import RunSpec

CONFIG_VERBS = ("run", "check")
RUN_VERBS = ("runs", "show", "logs", "wait", "cancel", "resume", "accuracy")
_EXPLAIN = "--explain"


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        verb, rest = split_verb(words)
        if verb in RUN_VERBS:
            from orchestrator.run_verbs import run_verbs  # late: needs rich and click, which check does not

            return run_verbs(verb, rest)
        return _config_verb(verb, rest)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def split_verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb, `run` where there is none, and everything else; raises ConfigError for an unknown one."""
    verbs = CONFIG_VERBS + RUN_VERBS
    takes_value = False
    for index, word in enumerate(words):
        if takes_value:
            takes_value = False
        elif word in config.VALUE_FLAGS + config.DIR_FLAGS:
            takes_value = True
        elif not word.startswith(("-", "+", "~")) and "=" not in word:
            if word not in verbs:
                close = get_close_matches(word, verbs, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ConfigError([f"{word}: there is no such verb.{hint} Verbs: {', '.join(verbs)}."])
            return word, words[:index] + words[index + 1 :]
    return "run", words


def _config_verb(verb: str, argv: list[str]) -> int:
    """Compose all jobs, then check or run them one after the other; the highest of their exit codes."""
    config.check_flags(argv, (_EXPLAIN,))
    explained = _EXPLAIN in argv
    if explained and verb == "run":
        raise ConfigError([f"{_EXPLAIN}: run starts the run and explains nothing. Write check {_EXPLAIN} for that"])
    specs = config.compose_jobs([word for word in argv if word != _EXPLAIN])
    rows = {name: accuracy.read(Path(name).expanduser()) for name in {spec.launch.runs_dir for spec in specs}}
    printed: list[dict[str, object]] = []
    codes = [0]
    for spec in specs:
        try:
            finished = rows[spec.launch.runs_dir]
            code, answer = _check(spec, finished, explained) if verb == "check" else _run(spec, finished)
        except OrchestratorError as error:
            print(error, file=sys.stderr)
            code = int(error.exit_code)
            answer = {"choices": spec.choices, "error": str(error), "exit_code": code}
        printed.append(answer)
        codes.append(code)
        if answer.get("interrupted"):  # Ctrl-C is meant for the whole sweep
            break
    if any(spec.output == "json" for spec in specs):
        sweep = any(word in ("-m", "--multirun") for word in argv)
        print(json.dumps(printed if sweep else printed[0], indent=2))
    return max(codes)


def _check(spec: RunSpec, rows: Sequence[Row], explained: bool) -> tuple[int, dict[str, object]]:
    seen, plan = judge(spec, rows)
    ledger: str | None = None
    if (explained or spec.output == "explain") and plan.verdict.estimate.peak_device_bytes is not None:
        from orchestrator.memory import explain  # late: only this asks for it

        ledger = explain.as_text(seen.train)
    if spec.output != "json":
        print(output.as_text(seen, plan) + (f"\n\n{ledger}" if ledger else ""))
    answer: dict[str, object] = output.as_json(seen, plan)
    return int(verdict_code(seen, plan)), answer | {"explain": ledger} if explained else answer


def _run(spec: RunSpec, rows: Sequence[Row]) -> tuple[int, dict[str, object]]:
    seen, plan = judge(spec, rows)
    answer = output.as_json(seen, plan)
    code = verdict_code(seen, plan)
    if code is not ExitCode.DONE:
        if spec.output != "json":
            print(output.as_text(seen, plan), file=sys.stderr)
        return int(code), answer
    all_the_same = overridden(seen, plan)
    if all_the_same is not None:
        print(f"{all_the_same}: goes on in spite of the verdict ({plan.verdict.reason})", file=sys.stderr)
    from orchestrator import ledger  # late: needs rich and submitit, which a refusal does not
    from orchestrator.start import start

    started = start(seen, plan, answer)
    record = ledger.read(started.run_dir)
    answer |= {"run": record.name, "run_dir": str(record.run_dir), "interrupted": started.interrupted}
    answer |= {"state": record.state, "report": record.report and record.report.model_dump(mode="json")}
    return started.exit_code, answer
