"""The loop: what ends a run, what it reports, and that its arithmetic does not depend on how a step is cut up."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.small_run import (
    log,
    losses,
    on_ranks,
    one_rank,
    small_spec,
    surroundings,
    train_here,
    train_ranks,
)
from tests.specs import train_spec
from train import loop, shapes
from train.__main__ import main, next_attempt
from train.corpus import prepare
from train.data import Sequences
from train.evaluation import evaluate
from train.loop import TrainError
from train.loss import cross_entropy
from train.model import eval_mode
from train.optim import learning_rate
from train.parallel import build_sharded
from train.rank import run_rank
from train.report import STEPS_FILE, StepReport, append_step, read_report, read_steps, write_json
from train.spec import TrainSpec

CPU = torch.device("cpu")
ENDLESS = "budget.max_steps=1000000"


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / STEPS_FILE).read_text(encoding="utf-8").splitlines()]


# What ends a run.


@pytest.mark.parametrize(
    ("limits", "steps", "outcome", "reason"),
    [
        (("budget.max_steps=3",), 3, "completed", "budget.max_steps=3"),
        (("budget.max_steps=null", "budget.max_tokens=1000"), 3, "completed", "budget.max_tokens=1000"),
        (("budget.max_steps=null", "budget.max_tokens=1024"), 4, "completed", "budget.max_tokens=1024"),
        (("budget.max_steps=2", "budget.max_tokens=1024"), 2, "completed", "budget.max_steps=2"),
        (("budget.max_steps=4", "budget.max_tokens=512"), 2, "completed", "budget.max_tokens=512"),
        (("budget.max_steps=9", "budget.max_wall_time_s=1e-3"), 1, "budget", "budget.max_wall_time_s=0.001"),
        (("budget.max_steps=9", "budget.max_device_hours=1e-7"), 1, "budget", "budget.max_device_hours=1e-07"),
        (("budget.max_steps=1", "budget.max_wall_time_s=1e-3"), 1, "completed", "budget.max_steps=1"),
    ],
)
def test_the_first_limit_ends_the_run_with_a_checkpoint_and_is_named(
    limits: tuple[str, ...], steps: int, outcome: str, reason: str, tmp_path: Path
) -> None:
    report = train_here(small_spec(tmp_path, *limits), tmp_path / "run")
    assert (report.steps, report.outcome, report.stop_reason) == (steps, outcome, reason)
    assert report.tokens == steps * 256
    assert report.checkpoint == f"checkpoints/step-{steps:08d}"
    assert report.final_eval_loss is not None


@pytest.mark.parametrize(("limit", "value"), [("budget.max_wall_time_s", 1.0), ("budget.max_device_hours", 1.0 / 3600)])
def test_a_limit_of_time_is_not_passed_and_most_of_it_is_used(limit: str, value: float, tmp_path: Path) -> None:
    spec = small_spec(tmp_path, ENDLESS, f"{limit}={value!r}", "checkpoint.every_steps=1000000")
    report = train_here(spec, tmp_path / "run")
    assert report.outcome == "budget"
    steps = read_steps(tmp_path / "run" / STEPS_FILE)
    longest = max(step.step_time_s for step in steps)
    assert 1.0 - 2 * longest < steps[-1].wall_time_s < 1.0 + longest  # on a busy machine no two steps are alike
    again = train_here(spec, tmp_path / "run", attempt=2)
    assert (again.outcome, again.steps, again.stop_reason) == ("budget", report.steps, report.stop_reason)


def test_a_resume_with_more_time_goes_on(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "budget.max_wall_time_s=1e-3"), tmp_path / "run")
    report = train_here(small_spec(tmp_path, "budget.max_wall_time_s=100.0"), tmp_path / "run", attempt=2)
    assert (report.outcome, report.steps) == ("completed", 6)


def test_a_run_asked_to_stop_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    report = train_here(small_spec(tmp_path), tmp_path / "run", stop_requested=lambda: next(asked))
    assert (report.outcome, report.steps, report.stop_reason) == ("stopped", 3, "asked to stop")
    assert report.checkpoint == "checkpoints/step-00000003"
    assert report.final_eval_loss is None


def _terminating(spec_file: str, run_dir: str) -> int:
    """A rank; the last one gets a SIGTERM after two steps."""

    def terminate() -> None:
        while len(read_steps(Path(run_dir) / STEPS_FILE)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        threading.Thread(target=terminate, daemon=True).start()
    return main([spec_file, run_dir])


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    spec = small_spec(tmp_path, "parallel.devices_per_node=2", "train.micro_batch=2", ENDLESS)
    (run_dir / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    codes = on_ranks(2, run_dir, _terminating, str(run_dir / "spec.json"), str(run_dir))
    assert codes == [0, 0], log(run_dir)
    report = read_report(run_dir, 1)
    assert report is not None
    assert report.outcome == "stopped"
    assert report.steps >= 2
    assert report.checkpoint == f"checkpoints/step-{report.steps:08d}"
    assert log(run_dir).splitlines()[-1] == f"stopped after step {report.steps}: asked to stop"


@pytest.mark.slow
def test_sigterm_to_the_command_ends_it_cleanly(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "spec.json").write_text(small_spec(tmp_path, ENDLESS).model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "train", str(tmp_path / "spec.json"), str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 60
        while not read_steps(run_dir / STEPS_FILE) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    report = read_report(run_dir, 1)
    assert report is not None
    assert report.outcome == "stopped"


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_a_loss_that_is_not_finite_ends_the_run_with_what_to_set(clip: str, tmp_path: Path) -> None:
    spec = small_spec(
        tmp_path, "optim.lr=1e30", "optim.warmup_steps=0", f"optim.clip_norm={clip}", "checkpoint.every_steps=100"
    )
    with pytest.raises(TrainError, match=r"the loss of step 2 is (nan|inf)\. Lower optim\.lr, raise optim\.warmup_st"):
        train_here(spec, tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 1
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_held_out_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, "optim.lr=1e30", "optim.warmup_steps=0", "budget.max_steps=1")
    with pytest.raises(TrainError, match=r"the held-out loss after step 1 is (nan|inf)\. Lower optim\.lr"):
        train_here(spec, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_gradients_that_are_not_finite_end_the_run_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A finite loss with gradients that are not cannot be had by a setting alone.
    monkeypatch.setattr(loop, "clip_gradients", lambda parameters, max_norm: math.nan)
    with pytest.raises(TrainError, match=r"the norm of the gradients of step 1 is nan\. Lower optim\.lr"):
        train_here(small_spec(tmp_path, "checkpoint.every_steps=1"), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


# What it reports.


def test_there_is_one_line_a_step_with_all_documented_fields(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run")
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in found] == [256 * step for step in range(1, 7)]
    assert all(list(line) == list(StepReport.model_fields) for line in found)


def test_what_nobody_measured_is_null(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "train.eval.every_steps=4", "optim.clip_norm=null"), tmp_path / "run")
    found = lines(tmp_path / "run")
    for field in ("mfu", "grad_norm", "peak_allocated_bytes", "peak_reserved_bytes"):
        assert {line[field] for line in found} == {None}, field
    for field in ("eval_loss", "eval_nats_per_byte"):
        assert [line[field] is None for line in found] == [True, True, True, False, True, False], field


def test_what_was_measured_is_a_number(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run")
    for line in lines(tmp_path / "run"):
        for field in ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "wall_time_s"):
            assert isinstance(line[field], float), field
            assert line[field] > 0, field
        assert line["tokens_per_s"] == pytest.approx(256 / line["step_time_s"])
        assert isinstance(line["rss_growth_bytes"], int)


def test_mfu_is_the_models_flops_over_the_devices_peak(tmp_path: Path) -> None:
    overrides = ("device.peak_flops_fp32=1e12", "train.grad_accum=2", "budget.max_steps=1")
    spec = small_spec(tmp_path, *overrides)
    train_here(spec, tmp_path / "run")
    (line,) = lines(tmp_path / "run")
    assert line["mfu"] == pytest.approx(2 * shapes.step_flops(spec.model, 4, 64) / line["step_time_s"] / 1e12)


def test_mfu_of_bf16_is_of_the_bf16_peak(tmp_path: Path) -> None:
    overrides = ("device.peak_flops_fp32=1e12", "train.precision=bf16_mixed", "budget.max_steps=1")
    train_here(small_spec(tmp_path, *overrides), tmp_path / "run")
    assert lines(tmp_path / "run")[0]["mfu"] is None


def test_the_report_has_the_prediction_beside_the_measurement(tmp_path: Path) -> None:
    report = train_here(small_spec(tmp_path), tmp_path / "run", predicted_peak_bytes=123)
    assert report.predicted_peak_bytes == 123
    assert report.measured_peak_bytes is not None
    assert report.rss_baseline_bytes is not None
    assert report.rss_growth_bytes is not None
    assert report.measured_peak_bytes == report.rss_baseline_bytes + report.rss_growth_bytes


def test_the_report_sums_the_steps_up(tmp_path: Path) -> None:
    report = train_here(small_spec(tmp_path), tmp_path / "run")
    steps = read_steps(tmp_path / "run" / STEPS_FILE)
    assert (report.first_loss, report.final_loss) == (steps[0].loss, steps[-1].loss)
    assert report.final_eval_loss == steps[-1].eval_loss
    assert (report.world_size, report.torch_version) == (1, torch.__version__)


def test_each_step_is_told_as_it_is_written(tmp_path: Path) -> None:
    told: list[StepReport] = []
    train_here(small_spec(tmp_path), tmp_path / "run", on_step=told.append)
    assert told == read_steps(tmp_path / "run" / STEPS_FILE)


def test_a_half_line_of_a_killed_writer_costs_no_other_line(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run")
    path = tmp_path / "run" / STEPS_FILE
    steps = read_steps(path)
    os.truncate(path, path.stat().st_size - 20)
    append_step(path, steps[-1].model_copy(update={"step": 7}))
    assert [step.step for step in read_steps(path)] == [1, 2, 3, 4, 5, 7]


# The arithmetic of a step.


@pytest.mark.parametrize(("micro_batch", "grad_accum"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_loses_what_a_larger_micro_batch_loses(micro_batch: int, grad_accum: int, tmp_path: Path) -> None:
    train_here(small_spec(tmp_path, "train.micro_batch=8"), tmp_path / "large")
    cut = (f"train.micro_batch={micro_batch}", f"train.grad_accum={grad_accum}")
    train_here(small_spec(tmp_path, *cut), tmp_path / "cut")
    # One rounding of fp32 at a loss of 5.5 is 5e-7.
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "large"), abs=2e-6)


def test_two_runs_are_equal_bit_by_bit(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train_here(small_spec(tmp_path), tmp_path / name)
    learned = ("loss", "grad_norm", "lr", "eval_loss")
    first, second = ([[line[f] for f in learned] for line in lines(tmp_path / n)] for n in ("first", "second"))
    assert first == second


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "first")
    train_here(small_spec(tmp_path, "train.seed=1"), tmp_path / "second")
    assert losses(tmp_path / "first")[0] != losses(tmp_path / "second")[0]


def test_all_implementations_of_the_optimizer_learn_the_same(tmp_path: Path) -> None:
    for impl in ("fused", "foreach", "forloop"):
        train_here(small_spec(tmp_path, f"optim.impl={impl}"), tmp_path / impl)
    for impl in ("foreach", "forloop"):
        assert losses(tmp_path / impl) == pytest.approx(losses(tmp_path / "fused"), abs=1e-5)


def test_the_norm_that_is_reported_is_the_one_before_clipping(tmp_path: Path) -> None:
    for name, clip in (("loose", "1e6"), ("tight", "1e-3")):
        train_here(small_spec(tmp_path, f"optim.clip_norm={clip}", "budget.max_steps=1"), tmp_path / name)
    loose, tight = (lines(tmp_path / name)[0]["grad_norm"] for name in ("loose", "tight"))
    assert loose == tight
    assert float(str(loose)) > 1e-3


def test_a_loss_is_computed_in_fp32() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None]).mean()
    assert torch.allclose(cross_entropy(logits, targets), expected)


# The learning rate.


def rate(step: int, *overrides: str) -> float:
    return learning_rate(train_spec("model=tiny", "optim.lr=1.0", "optim.warmup_steps=10", *overrides), step)


def test_the_warm_up_is_linear() -> None:
    assert [rate(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_without_a_warm_up_the_first_step_has_nearly_the_whole_rate() -> None:
    assert rate(1, "optim.warmup_steps=0") == pytest.approx(1.0, abs=1e-4)


def test_the_cosine_is_half_way_in_the_middle_and_ends_at_its_floor() -> None:
    overrides = ("budget.max_steps=110", "optim.min_lr_fraction=0.2")
    assert [rate(step, *overrides) for step in (60, 110, 111, 500)] == pytest.approx([0.6, 0.2, 0.2, 0.2])


def test_the_cosine_ends_where_the_tokens_end() -> None:
    overrides = ("budget.max_steps=null", "budget.max_tokens=51200", "optim.min_lr_fraction=0.0")
    assert train_spec("model=tiny", *overrides).planned_steps == 100
    assert rate(100, *overrides) == pytest.approx(0.0)
    assert rate(55, *overrides) == pytest.approx(0.5)


def test_decay_steps_take_the_place_of_the_budget() -> None:
    assert rate(60, "optim.decay_steps=60", "optim.min_lr_fraction=0.1") == pytest.approx(0.1)


def test_a_constant_rate_stays() -> None:
    assert {rate(step, "optim.schedule=constant") for step in (10, 11, 1000)} == {1.0}


_SCHEDULED = train_spec("model=tiny", "optim.lr=1.0")


@given(st.integers(0, 50), st.integers(1, 100), st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_never_again(warmup: int, decay: int, floor: float) -> None:
    update = {"warmup_steps": warmup, "decay_steps": decay, "min_lr_fraction": floor}
    spec = _SCHEDULED.model_copy(update={"optim": _SCHEDULED.optim.model_copy(update=update)})
    rates = [learning_rate(spec, step) for step in range(1, 160)]
    assert all(0 <= r <= 1 for r in rates)
    assert rates[: warmup or 1] == sorted(rates[: warmup or 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[-1] == pytest.approx(floor)


def test_the_loop_trains_with_the_scheduled_rate(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    train_here(spec, tmp_path / "run")
    assert [line["lr"] for line in lines(tmp_path / "run")] == [learning_rate(spec, step) for step in range(1, 7)]


# Evaluation.

EVAL = ("train.eval.sequences=1000", "data.eval_fraction=0.0141")
"""All of the held-out part, which has 23 sequences: no rank or micro-batch divides them."""


def evaluated(spec: TrainSpec, cache: Path) -> float:
    sequences = Sequences(prepare(spec.data, spec.model, spec.train.seq_len, cache), spec.train.seq_len, 0)
    assert sequences.num_eval == 23
    try:
        return evaluate(spec, build_sharded(spec, CPU), sequences, CPU)
    finally:
        sequences.close()


def _evaluated_ranks(spec_json: str, cache: str, file: str) -> None:
    dist.init_process_group("gloo")
    loss = evaluated(TrainSpec.model_validate_json(spec_json), Path(cache))
    Path(f"{file}.{dist.get_rank()}").write_text(repr(loss), encoding="utf-8")
    dist.destroy_process_group()


def one_by_one(spec: TrainSpec, cache: Path) -> float:
    """Mean held-out loss, each sequence by itself."""
    sequences = Sequences(prepare(spec.data, spec.model, spec.train.seq_len, cache), spec.train.seq_len, 0)
    module = build_sharded(spec, CPU)
    with eval_mode(module):
        found = []
        for index in range(sequences.num_eval):
            inputs, targets = sequences.held_out(index, 1)
            found.append(cross_entropy(module(inputs), targets).item())
    sequences.close()
    return sum(found) / len(found)


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 23, 50])
def test_evaluation_has_every_held_out_sequence_once_whatever_the_micro_batch(micro_batch: int, tmp_path: Path) -> None:
    spec = small_spec(tmp_path, *EVAL, f"train.micro_batch={micro_batch}")
    assert evaluated(spec, tmp_path / "cache") == pytest.approx(one_by_one(spec, tmp_path / "cache"), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 4), (3, 8)])
def test_evaluation_has_every_held_out_sequence_once_whatever_the_ranks(
    ranks: int, micro_batch: int, tmp_path: Path
) -> None:
    spec = small_spec(tmp_path, *EVAL, f"parallel.devices_per_node={ranks}", f"train.micro_batch={micro_batch}")
    expected = one_by_one(small_spec(tmp_path, *EVAL), tmp_path / "cache")
    arguments = (spec.model_dump_json(), str(tmp_path / "cache"), str(tmp_path / "loss"))
    assert set(on_ranks(ranks, tmp_path, _evaluated_ranks, *arguments)) == {0}, log(tmp_path)
    found = [float((tmp_path / f"loss.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    assert found == pytest.approx([expected] * ranks, abs=1e-6)


def test_evaluation_of_a_few_sequences_takes_the_first(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, *EVAL[1:], "train.eval.sequences=5")
    here = surroundings(spec, tmp_path / "run")
    sequences, module = Sequences(here.corpus, 64, 0), build_sharded(spec, CPU)
    with eval_mode(module):
        inputs, targets = sequences.held_out(0, 5)
        expected = cross_entropy(module(inputs), targets).item()
    assert evaluate(spec, module, sequences, CPU) == pytest.approx(expected, abs=1e-6)
    sequences.close()


def test_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "rare")
    train_here(small_spec(tmp_path, "train.eval.every_steps=1"), tmp_path / "often")
    assert losses(tmp_path / "rare") == losses(tmp_path / "often")


# The command.


@pytest.mark.slow
def test_ranks_that_do_not_fit_the_plan_are_refused(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, "parallel.devices_per_node=2")
    (tmp_path / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    assert on_ranks(1, tmp_path, main, [str(tmp_path / "spec.json"), str(tmp_path / "run")]) == [7]
    assert log(tmp_path) == "1 ranks were started for a plan of 2\n"
    record = json.loads((tmp_path / "run/failure.1.rank0.json").read_text(encoding="utf-8"))
    assert (record["kind"], record["explained"], record["out_of_memory"]) == ("TrainError", True, False)


def _run_rank(spec_json: str, run_dir: str) -> int:
    return run_rank(TrainSpec.model_validate_json(spec_json), Path(run_dir))


@pytest.mark.slow
def test_a_disk_that_is_full_between_checkpoints_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / STEPS_FILE).symlink_to("/dev/full")
    assert on_ranks(1, run_dir, _run_rank, small_spec(tmp_path).model_dump_json(), str(run_dir)) == [7]
    assert log(run_dir) == f"{run_dir}: No space left on device. Free space there, then resume.\n"


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"report\.json"):
        write_json(tmp_path / "report.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.slow
def test_wrong_data_ends_the_command_as_a_config_error_without_a_traceback(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    (tmp_path / "text.txt").unlink()
    assert train_ranks(spec, tmp_path / "run") == [2]
    assert log(tmp_path / "run").startswith("data.path=")
    assert "Traceback" not in log(tmp_path / "run")


@pytest.mark.slow
def test_a_start_after_a_failed_one_is_another_attempt(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    (tmp_path / "text.txt").rename(tmp_path / "gone")
    assert train_ranks(spec, tmp_path / "run") == [2]
    (tmp_path / "gone").rename(tmp_path / "text.txt")
    assert train_ranks(spec, tmp_path / "run") == [0]
    assert (tmp_path / "run/failure.1.rank0.json").exists()
    assert read_report(tmp_path / "run", 2) is not None


def test_a_start_after_a_killed_one_is_another_attempt(tmp_path: Path) -> None:
    train_here(small_spec(tmp_path), tmp_path / "run", attempt=4)
    assert next_attempt(tmp_path / "run") == 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "usage: python -m train SPEC.json RUN_DIR"),
        (["none.json", "run"], "none.json: No such file or directory"),
        (["broken.json", "run"], "broken.json: it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (["empty.json", "run"], "empty.json: model: Field required"),
        (["odd.json", "run"], "model.num_heads=7: 7 heads do not divide model.d_model=64. Set it to 2, 4, 8, 16, 32"),
        (["offload.json", "run"], "parallel.cpu_offload=true: the trainer does not offload yet. Set it to false"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = json.loads(small_spec(tmp_path).model_dump_json())
    Path("broken.json").write_text("spec", encoding="utf-8")
    Path("empty.json").write_text("{}", encoding="utf-8")
    Path("odd.json").write_text(json.dumps(spec | {"model": spec["model"] | {"num_heads": 7}}), encoding="utf-8")
    offload = {"parallel": spec["parallel"] | {"cpu_offload": True}, "device": spec["device"] | {"kind": "auto"}}
    Path("offload.json").write_text(json.dumps(spec | offload), encoding="utf-8")
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not Path("run").exists()
