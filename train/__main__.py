"""`python -m train SPEC.json RUN_DIR`: train as one rank, without an orchestrator; torchrun starts several.

SPEC.json is a run's spec.json, or the object under its key `train`.
"""

import json
import os
import sys
from pathlib import Path

from train.rank import run_rank
from train.spec import TrainSpec


def main(argv: list[str]) -> int:
    """Exit code of the rank."""
    if len(argv) != 2:
        print("usage: python -m train SPEC.json RUN_DIR", file=sys.stderr)
        return 2
    content = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    if "launch" in content:
        content = content["train"]
    run_dir = Path(argv[1])
    run_dir.mkdir(parents=True, exist_ok=True)
    attempts = [int(p.name.split(".")[1]) for p in run_dir.glob("report.*.json")]
    return run_rank(TrainSpec.model_validate_json(json.dumps(content)), run_dir, attempt=max(attempts, default=0) + 1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank whose peers died must not wait for them in an exit handler
