"""The grid that a GPU is to be measured on: its choice, its budget of time, its record."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from orchestrator.device import resolve
from orchestrator.memory.formula import estimate
from orchestrator.project import CONF_DIR
from tests.gpu import measure
from tests.gpu.measure import Case, Measured
from train.spec import DeviceSpec, TrainSpec

GIB = 1024**3
TINY = Case(name="tiny", overrides=("model=tiny", "train.seq_len=64"))
OTHER = Case(name="other", overrides=("model=tiny", "train.seq_len=64", "ckpt=full"))
THIRD = Case(name="third", overrides=("model=tiny", "train.seq_len=64", "train.precision=bf16_mixed"))


def card(name: str) -> DeviceSpec:
    return DeviceSpec.model_validate(yaml.safe_load((CONF_DIR / "device" / f"{name}.yaml").read_text(encoding="utf-8")))


def ran(spec: TrainSpec, timeout_s: float) -> Measured:
    """As if it had taken exactly what is predicted."""
    found = estimate(spec)
    return Measured(
        outcome="ran",
        detail="",
        torch="2.9.0",
        figures=dict.fromkeys(measure._FIGURES, 0)
        | {"steady_allocated": found.peak_allocated_bytes, "steady_reserved": found.peak_reserved_bytes},
        device_bytes=found.peak_device_bytes,
        besides_bytes=0,
        step_time_s=0.1,
    )


def died(spec: TrainSpec, timeout_s: float) -> Measured:
    return measure._nothing("out_of_memory", "CUDA out of memory. Tried to allocate 20.00 GiB.", "2.9.0")


class Clock:
    """Goes on by so many seconds with each measurement."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.now

    def around(self, inner: Callable[[TrainSpec, float], Measured]) -> Callable[[TrainSpec, float], Measured]:
        def timed(spec: TrainSpec, timeout_s: float) -> Measured:
            self.now += self.seconds
            return inner(spec, timeout_s)

        return timed


@pytest.mark.parametrize("name", ["v100_16gb", "rtx_4090", "a100_40gb", "h100_80gb"])
def test_no_config_is_predicted_to_take_more_than_four_fifths_of_the_card(name: str) -> None:
    device = card(name)
    assert device.usable_bytes is not None
    sizes = [measure.sized(case, device) for case in measure.cases()]
    peaks = [estimate(spec).peak_device_bytes for spec in sizes if spec is not None]
    assert len(peaks) >= 7  # a V100 has no bf16
    assert all(peak is not None and peak <= 0.8 * device.usable_bytes for peak in peaks)


@pytest.mark.parametrize("name", ["a100_40gb", "h100_80gb"])
def test_the_largest_configs_fill_the_card(name: str) -> None:
    device = card(name)
    assert device.usable_bytes is not None
    shares = []
    for case in measure.cases():
        spec = measure.sized(case, device)
        if case.fill and spec is not None:
            peak = estimate(spec).peak_device_bytes
            assert peak is not None
            shares.append(peak / device.usable_bytes)
    assert len(shares) >= 8
    assert max(shares) > 0.75


def test_the_grid_covers_policies_precisions_losses_and_optimizers() -> None:
    words = [word for case in measure.cases() for word in case.overrides]
    for word in (
        *("ckpt=none", "ckpt=full", "ckpt=selective", "ckpt=ops", "train.precision=bf16_mixed", "train.precision=bf16"),
        *("train.loss=chunked", "optim.impl=foreach", "optim.impl=forloop", "model.attention=math"),
    ):
        assert word in words
    names = [case.name for case in measure.cases()]
    assert len(names) == len(set(names))


def test_a_grid_leaves_a_row_a_case_with_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "card.csv"
    lines = list(measure.run_grid([TINY, OTHER], card("a100_40gb"), path, budget_s=60, measure=ran))
    assert [row["name"] for row in measure.read_rows(path)] == ["tiny", "other"]
    for row in measure.read_rows(path):
        assert (row["error_allocated"], row["error_reserved"], row["error_device"]) == ("+0.0000",) * 3
        assert int(row["measured_device_bytes"]) == int(row["predicted_device_bytes"]) > GIB // 2
    assert all("(+0.0%)" in line for line in lines)


def test_a_grid_that_is_started_again_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "card.csv"
    asked: list[str] = []

    def noted(spec: TrainSpec, timeout_s: float) -> Measured:
        asked.append(spec.ckpt.policy)
        return ran(spec, timeout_s)

    list(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=noted))
    lines = list(measure.run_grid([TINY, OTHER], card("a100_40gb"), path, budget_s=60, measure=noted))
    assert asked == ["none", "full"]
    assert lines[0].endswith("in the file")


def test_a_case_that_runs_out_of_memory_is_a_row_and_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "card.csv"
    list(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=died))
    (row,) = measure.read_rows(path)
    assert row["outcome"] == "out_of_memory"
    assert "Tried to allocate" in row["detail"]
    assert row["predicted_steady_reserved_bytes"] != ""
    assert row["error_reserved"] == ""
    assert "in the file" in next(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=ran))


def test_a_case_that_failed_otherwise_is_tried_again_and_has_one_row(tmp_path: Path) -> None:
    path = tmp_path / "card.csv"

    def failed(spec: TrainSpec, timeout_s: float) -> Measured:
        return measure._nothing("failed", "exit code 1: it said nothing")

    list(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=failed))
    list(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=ran))
    assert [row["outcome"] for row in measure.read_rows(path)] == ["ran"]


def test_no_case_is_started_that_would_pass_the_budget(tmp_path: Path) -> None:
    path, clock = tmp_path / "card.csv", Clock(40.0)
    grid = [TINY, OTHER, THIRD]
    lines = list(measure.run_grid(grid, card("a100_40gb"), path, budget_s=100, measure=clock.around(ran), clock=clock))
    assert [row["name"] for row in measure.read_rows(path)] == ["tiny", "other"]
    assert "left out: 20 s left, the longest took 40 s" in lines[2]


def test_fresh_predictions_keep_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "card.csv"
    list(measure.run_grid([TINY], card("a100_40gb"), path, budget_s=60, measure=ran))
    before = path.read_text(encoding="utf-8")
    rows = [dict(row) | {"predicted_device_bytes": "1", "error_device": "-0.9999"} for row in measure.read_rows(path)]
    measure.write_rows(path, rows)
    assert "1 of 1 rows ran" in measure.predict_again(path)
    assert path.read_text(encoding="utf-8") == before


def test_a_process_that_is_not_done_in_time_is_recorded_as_such() -> None:
    found = measure.measure_in_process(measure.spec_of(TINY.overrides, card("a100_40gb")), 0.01)
    assert (found.outcome, found.figures["steady_reserved"]) == ("timed_out", None)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_process_that_fails_is_recorded_with_the_last_that_it_said() -> None:
    found = measure.measure_in_process(measure.spec_of(TINY.overrides, card("a100_40gb")), 120.0)
    assert found.outcome == "failed"
    assert found.detail.startswith("exit code 1: ")
    assert any(word in found.detail for word in ("CUDA", "NVIDIA", "cuda"))


@pytest.mark.slow
def test_a_small_config_is_measured_on_this_machine(tmp_path: Path) -> None:
    device = resolve(measure.composed("device=cpu")).device
    path = tmp_path / "cpu.csv"
    (line,) = measure.run_grid(measure.cpu_cases()[:1], device, path, budget_s=120)
    with path.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["outcome"] == "ran", line
    assert abs(float(row["error_device"])) < 0.15
