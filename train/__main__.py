"""`python -m train SPEC.json RUN_DIR`: train as one rank, without an orchestrator; torchrun starts several.

SPEC.json is a run's spec.json, or the object under its key `train`.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from train.checks import problems, unsupported
from train.rank import CONFIG_ERROR, run_rank
from train.report import STEPS_FILE, read_steps
from train.spec import TrainSpec


def main(argv: list[str]) -> int:
    """Exit code of the rank."""
    if len(argv) != 2:
        print("usage: python -m train SPEC.json RUN_DIR", file=sys.stderr)
        return CONFIG_ERROR
    spec = _read_spec(Path(argv[0]))
    if isinstance(spec, str):
        print(spec, file=sys.stderr)
        return CONFIG_ERROR
    run_dir = Path(argv[1])
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_rank(spec, run_dir, attempt=next_attempt(run_dir))


def _read_spec(path: Path) -> TrainSpec | str:
    """The spec, or what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "launch" in content:
            content = content["train"]
        spec = TrainSpec.model_validate_json(json.dumps(content))
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValidationError as error:  # a ValueError too
        return "\n".join(f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    except ValueError as error:
        return f"{path}: it is not JSON ({error})"
    found = problems({name: getattr(spec, name) for name in TrainSpec.model_fields}) + unsupported(spec)
    return "\n".join(map(str, found)) or spec


def next_attempt(run_dir: Path) -> int:
    """One more than the last start that left a report, a failure or a step."""
    left = [*run_dir.glob("report.*.json"), *run_dir.glob("failure.*.rank*.json")]
    attempts = [int(path.name.split(".")[1]) for path in left]
    attempts += [step.attempt for step in read_steps(run_dir / STEPS_FILE)]
    return max(attempts, default=0) + 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError):  # what cannot be written, on a full disk, must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a rank whose peers died must not wait for them in an exit handler
