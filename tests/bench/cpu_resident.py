"""What a CPU rank's resident set holds beside the tensors that the formula counts.

`python tests/bench/cpu_resident.py` runs a few models for some steps, as the trainer does (freed memory is returned)
and with glibc's own thresholds, and prints a line for each. The two numbers of conf/device/cpu.yaml and the margin of
orchestrator/oomguard.py come from here.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_MIB = 1024**2
_RUNS = (
    ("model=tiny",),
    ("model=small", "train.micro_batch=8"),
    ("model=small", "train.micro_batch=32"),
    ("model=small", "train.micro_batch=32", "ckpt=full"),
    ("model=huge", "train.micro_batch=8"),
    ("model=mega", "train.micro_batch=1"),
    ("model=mega", "train.micro_batch=1", "train.precision=bf16_mixed"),
    ("model=small", "train.micro_batch=8", "parallel.devices_per_node=2"),
    ("model=mega", "train.micro_batch=1", "parallel.devices_per_node=2"),
)
_COMMON = ("device=cpu", "budget.max_steps=5", "train.eval.sequences=4", "tracking=none", "optim.warmup_steps=0")


def measure(overrides: tuple[str, ...], returned: bool) -> str:
    """One run; a line with MiB of the baseline, the tensors, and what the growth had beside them."""
    with tempfile.TemporaryDirectory() as folder:
        # The threshold that glibc comes to by itself, its highest.
        environment = dict(os.environ) | ({} if returned else {"MALLOC_MMAP_THRESHOLD_": "33554432"})
        words = [*overrides, *_COMMON, f"launch.runs_dir={folder}", "output=json"]
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        answer = json.loads(done.stdout)
        report = json.loads((Path(answer["run_dir"]) / "report.1.json").read_text(encoding="utf-8"))
    tensors = answer["estimate"]["peak_allocated_bytes"]
    beside = report["rss_growth_bytes"] - tensors
    predicted, measured = report["predicted_peak_bytes"], report["measured_peak_bytes"]
    return (
        f"{' '.join(overrides):<58} {'returned' if returned else 'glibc':<9}"
        f" baseline {report['rss_baseline_bytes'] / _MIB:5.0f}  tensors {tensors / _MIB:6.0f}"
        f"  beside them {beside / _MIB:5.0f} ({beside / tensors:+.0%})"
        f"  {report['tokens_per_s']:6.0f} tokens/s"
        f"  predicted {predicted / _MIB:6.0f}  measured {measured / _MIB:6.0f} ({predicted / measured - 1:+.1%})"
    )


if __name__ == "__main__":
    for run in _RUNS:
        for each_returned in (True, False):
            print(measure(run, each_returned), flush=True)
