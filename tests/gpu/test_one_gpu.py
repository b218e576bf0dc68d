"""On a machine with a GPU: the prediction beside the CUDA allocator's own figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize("ckpt", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_the_predicted_peak_is_the_allocators(ckpt: str, precision: str, tmp_path: Path) -> None:
    words = ["model=mega", f"ckpt={ckpt}", f"train.precision={precision}", "budget.max_steps=5", "tracking=none"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words, f"launch.runs_dir={tmp_path}", "output=json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    answer = json.loads(done.stdout)
    report = json.loads((Path(answer["run_dir"]) / "report.1.json").read_text(encoding="utf-8"))
    predicted, reserved = answer["estimate"]["peak_allocated_bytes"], report["peak_reserved_bytes"]
    assert predicted == pytest.approx(report["peak_allocated_bytes"], rel=0.1)
    assert predicted <= reserved <= predicted + answer["estimate"]["margin_bytes"]
