"""How long a pre-flight takes, beside the time that an empty Python takes on the same machine.

`python tests/bench/check_time.py` prints the median of seven runs of each.
"""

import statistics
import subprocess
import sys
import time

_COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "check": [sys.executable, "-m", "orchestrator", "check", "model=behemoth", "device=a100_40gb"],
    "check of a refusal": [
        *[sys.executable, "-m", "orchestrator", "check", "model=behemoth", "device=a100_40gb"],
        "train.micro_batch=64",
    ],
    "check of 126 layers": [
        *[sys.executable, "-m", "orchestrator", "check", "model=llama3_405b", "device=h100_80gb"],
        *["parallel=node_8", "train.precision=bf16_mixed"],
    ],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    for name, each in _COMMANDS.items():
        print(f"{name:<20} {statistics.median(seconds(each) for _ in range(7)):.2f} s", flush=True)
