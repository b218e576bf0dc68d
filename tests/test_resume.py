"""What a resume keeps, what it may change, and when it is refused before anything happens."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator import cli, ledger
from orchestrator.errors import ConfigError, NotSubmittedError
from orchestrator.launch import folder
from orchestrator.ledger import RunRecord
from orchestrator.project import SOURCE_ROOT
from orchestrator.resume import _corpus_of, keep_tokens_per_step, resume_run
from orchestrator.spec import RunSpec
from orchestrator.start import prepare_data
from tests import recorded
from tests.specs import run_spec


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A cancelled run of 6 steps, 8 sequences a step on one rank; it was never frozen, so it cannot be started."""
    path = tmp_path / "runs" / "one"
    recorded.planned(path, "budget.max_steps=6", "train.micro_batch=4", "train.grad_accum=2", "launch.cpu_slots=8")
    recorded.submission(path)
    recorded.dead_node(path)
    recorded.exit_record(path, cause="cancelled")
    return path


def refusal(run_dir: Path, *overrides: str) -> tuple[int, str]:
    """Code and message of a resume that is refused, which leaves every file as it was."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises((ConfigError, NotSubmittedError), match=r".") as raised:
        resume_run(ledger.read(run_dir), overrides)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    return int(raised.value.exit_code), str(raised.value)


# Tokens of an optimizer step.


def two_specs(before: str, after: str) -> tuple[RunSpec, RunSpec, list[str]]:
    words = after.split()
    return run_spec(*before.split()), run_spec(*before.split(), *words), [word.partition("=")[0] for word in words]


@pytest.mark.parametrize(
    ("before", "after", "accum"),
    [
        ("train.micro_batch=4 train.grad_accum=2", "", 2),
        ("train.micro_batch=4 train.grad_accum=2", "parallel.devices_per_node=2", 1),
        ("train.micro_batch=4 train.grad_accum=1 parallel.devices_per_node=2", "parallel.devices_per_node=1", 2),
        ("train.micro_batch=8 train.grad_accum=1", "train.micro_batch=2", 4),
        ("train.micro_batch=8 train.grad_accum=1", "train.micro_batch=2 parallel.devices_per_node=2", 2),
        ("train.micro_batch=8 train.grad_accum=1", "train.micro_batch=2 train.grad_accum=4", 4),
    ],
)
def test_accumulation_makes_up_for_other_ranks_and_micro_batches(before: str, after: str, accum: int) -> None:
    was, spec, typed = two_specs(before, after)
    kept = keep_tokens_per_step(was, spec, typed)
    assert kept.train.train.grad_accum == accum
    assert kept.train.tokens_per_step == was.train.tokens_per_step


def test_a_number_of_ranks_that_cannot_keep_the_step_is_refused_with_those_that_can() -> None:
    was, spec, typed = two_specs("train.micro_batch=8 train.grad_accum=1", "parallel.devices_per_node=2")
    expected = (
        r"parallel\.devices_per_node=2: an optimizer step of this run has 8 sequences, and train\.micro_batch=8 "
        r"train\.grad_accum=1 on 2 ranks makes 16\. Set train\.micro_batch=1 train\.grad_accum=4, "
        r"train\.micro_batch=2 train\.grad_accum=2, train\.micro_batch=4 train\.grad_accum=1"
    )
    with pytest.raises(ConfigError, match=expected):
        keep_tokens_per_step(was, spec, typed)
    was, spec, typed = two_specs("train.micro_batch=8 train.grad_accum=1", "parallel.devices_per_node=3")
    with pytest.raises(ConfigError, match="Use a number of ranks that divides 8"):
        keep_tokens_per_step(was, spec, typed)


def test_a_typed_accumulation_that_changes_the_step_is_refused_and_not_overruled() -> None:
    was, spec, typed = two_specs("train.micro_batch=8 train.grad_accum=1", "train.grad_accum=2")
    with pytest.raises(ConfigError, match=r"train\.micro_batch=8 train\.grad_accum=2 on 1 ranks makes 16"):
        keep_tokens_per_step(was, spec, typed)


# What may change.


@pytest.mark.parametrize(
    "override", ["model.num_layers=2", "optim.lr=0.1", "data.path=x", "train.seq_len=64", "train.seed=1"]
)
def test_what_belongs_to_the_training_may_not_change(run_dir: Path, override: str) -> None:
    code, message = refusal(run_dir, override)
    assert code == 2
    assert message.startswith(f"{override}: it belongs to the training itself. A resume may change parallel, budget,")
    assert message.endswith("start a new run for this")


def test_all_that_may_not_change_is_said_together_with_keys_that_do_not_exist(run_dir: Path) -> None:
    code, message = refusal(run_dir, "optim.lr=0.1", "budget.max_step=9")
    assert code == 2
    assert message.startswith("2 errors in the config:\noptim.lr=0.1: ")
    assert "budget.max_step=9: there is no such key. Did you mean budget.max_steps?" in message


def test_a_value_of_the_wrong_kind_is_a_config_error(run_dir: Path) -> None:
    code, message = refusal(run_dir, "budget.max_steps=many")
    assert (code, message.partition(":")[0]) == (2, "budget.max_steps=many")


def test_a_run_stays_in_its_folder(run_dir: Path) -> None:
    code, message = refusal(run_dir, "launch.runs_dir=/elsewhere")
    assert (code, message.partition(":")[0]) == (2, "launch.runs_dir")


def test_more_ranks_than_this_machine_has_slots_are_refused(run_dir: Path) -> None:
    code, message = refusal(run_dir, "parallel.devices_per_node=8", "train.micro_batch=1", "launch.cpu_slots=4")
    assert code == 2
    assert "each rank leases 1 of this machine's 4 CPU slots. Set it to at most 4" in message


def test_a_run_whose_frozen_source_is_gone_is_refused_and_stays_as_it_was(run_dir: Path) -> None:
    code, message = refusal(run_dir, "budget.max_steps=9")
    assert code == 6
    assert "the source that one was started with is gone: " in message


# When.


def test_a_run_that_goes_on_is_refused_with_the_command_that_ends_it(run_dir: Path) -> None:
    (run_dir / "exit.1.json").unlink()
    recorded.node(run_dir)
    code, message = refusal(run_dir)
    assert (code, message) == (
        6,
        f"one is running. Cancel it first: python -m orchestrator cancel one --runs-dir {run_dir.parent}",
    )


def test_a_run_that_another_shell_is_resuming_is_refused(run_dir: Path) -> None:
    hold = "import sys; from pathlib import Path; from orchestrator.launch import folder\n"
    hold += "with folder.held(Path(sys.argv[1])):\n    print(flush=True)\n    sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run_dir)], cwd=SOURCE_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert refusal(run_dir) == (6, "one is being resumed from another shell. Nothing was started.")
        other.communicate(b"\n")
    with folder.held(run_dir):
        pass


def test_a_completed_run_says_what_to_raise(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.exit_record(run_dir)
    assert resume_run(ledger.read(run_dir), []) == 0
    assert capsys.readouterr().out == (
        "one: completed already (Ended after step 3: budget.max_steps=3.)\n"
        "  to train it further, raise the limit that ended it, e.g. budget.max_steps=...\n"
    )


def test_a_completed_run_with_a_raised_limit_goes_on(run_dir: Path) -> None:
    recorded.exit_record(run_dir)
    assert "is gone" in refusal(run_dir, "budget.max_steps=9")[1]  # it gets as far as the frozen source


def test_an_unknown_run_is_a_config_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", "two", "--runs-dir", str(run_dir.parent)]) == 2
    assert capsys.readouterr().err.startswith(f"two: there is no such run in {run_dir.parent}. The newest there: one.")


# The machine.


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_memory_that_was_read_from_the_machine_is_read_again(tmp_path: Path, device: str) -> None:
    run_dir = tmp_path / "runs" / "one"
    spec = recorded.planned(run_dir, f"device={device}", "budget.max_steps=6")
    seen = spec.train.device.model_copy(update={"kind": "cpu", "usable_bytes": 1000, "context_bytes": 0})
    ledger.write(
        run_dir / "spec.json", spec.model_copy(update={"train": spec.train.model_copy(update={"device": seen})})
    )
    recorded.submission(run_dir)
    recorded.exit_record(run_dir, cause="cancelled")
    assert "is gone" in refusal(run_dir)[1]  # 1000 bytes would not do: exit 3 before this


def test_usable_bytes_that_were_typed_stay(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume_run(ledger.read(run_dir), ["device.usable_bytes=1000"]) == 3
    assert "does not fit" in capsys.readouterr().err
    assert psutil.virtual_memory().available > 1000


def test_a_resume_uses_the_tokens_of_the_start_whatever_became_of_the_files(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 2000)
    spec = run_spec("data=text", f"data.path={text}", "model=tiny", f"launch.runs_dir={tmp_path / 'runs'}")
    corpus = prepare_data(spec)
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir()
    (run_dir / "corpus.json").write_text(corpus.model_dump_json())
    record = recorded_run(run_dir, spec)
    text.write_text("other words " * 2000)
    assert _corpus_of(record, spec) == corpus
    moved = tmp_path / "moved"
    (tmp_path / "runs").rename(moved)
    assert _corpus_of(recorded_run(moved / "one", spec), spec).data_fingerprint == corpus.data_fingerprint
    shutil.rmtree(moved / ".data")
    with pytest.raises(ConfigError, match="was trained on other tokens"):
        _corpus_of(recorded_run(moved / "one", spec), spec)


def recorded_run(run_dir: Path, spec: RunSpec) -> RunRecord:
    """A run folder with nothing but its spec and its corpus, read back."""
    (run_dir / "spec.json").write_text(spec.model_dump_json())
    return ledger.read(run_dir)


def test_a_limit_that_the_newest_checkpoint_has_passed_is_refused(run_dir: Path) -> None:
    complete = run_dir / "checkpoints" / "step-00000005"
    complete.mkdir(parents=True)
    (complete / ".metadata").touch()
    (run_dir / "checkpoints" / "step-00000009").mkdir()  # incomplete
    code, text = refusal(run_dir, "budget.max_steps=4")
    assert code == 2
    assert text == "budget.max_steps=4: one has made 5 steps, and this allows 4. Set it higher"
