"""The command line: verbs, exit codes, what goes to stdout, and Hydra's own flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from orchestrator import config, output
from orchestrator.cli import main, split_verb
from orchestrator.errors import ConfigError
from orchestrator.preflight import judge
from tests import recorded
from tests.specs import run_spec

TOO_LARGE = ["model=behemoth", "ckpt=none", "device=a100_40gb", "train.micro_batch=64"]


@pytest.mark.parametrize(
    ("words", "verb", "rest"),
    [
        ([], "run", []),
        (["model=tiny"], "run", ["model=tiny"]),
        (["check", "model=tiny"], "check", ["model=tiny"]),
        (["model=tiny", "-m", "check"], "check", ["model=tiny", "-m"]),
        (["--cfg", "job", "--resolve"], "run", ["--cfg", "job", "--resolve"]),
        (["-cd", "check", "model=tiny"], "run", ["-cd", "check", "model=tiny"]),
        (["show", "a-run"], "show", ["a-run"]),
        (["resume", "a-run", "budget.max_steps=3"], "resume", ["a-run", "budget.max_steps=3"]),
    ],
)
def test_the_verb_is_the_first_bare_word(words: list[str], verb: str, rest: list[str]) -> None:
    assert split_verb(words) == (verb, rest)


def test_a_bare_word_that_is_no_verb_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no such verb"):
        split_verb(["model=tiny", "behemoth"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["check", "model=tiny", "device=a100_40gb"], 0),
        (["check", "model=tiny", "model.num_heads=7"], 2),
        (["check", *TOO_LARGE], 3),
        (["check", "train.compile=true", "device=a100_40gb"], 4),
        (["check", "train.compile=true", "device=a100_40gb", "oomguard.allow_unknown=true"], 0),
        (["check", *TOO_LARGE, "oomguard.enforce=false"], 0),
        (["check", "model=tiny", "device=a100_40gb", "ckpt=full", "budget.max_recompute_fraction=0.1"], 5),
        (["model=tiny", "device=a100_40gb", "launch.runs_dir=/dev/null/runs"], 6),
        (["resume", "a-run-that-never-was"], 2),
        (["show", "a-run-that-never-was"], 2),
        (["logs"], 2),
    ],
)
def test_exit_codes(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if code != 0:
        assert captured.err.strip() or captured.out.strip()
    assert list(tmp_path.iterdir()) == []


def test_each_alternative_of_a_refusal_exits_with_0_when_it_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *TOO_LARGE, "output=json"]) == 3
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["alternatives"]
    for alternative in refusal["alternatives"]:
        assert main(["check", *TOO_LARGE, *alternative["overrides"]]) == 0


def test_run_refuses_what_does_not_fit_on_stderr_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TOO_LARGE, f"launch.runs_dir={tmp_path / 'runs'}"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fits with " in captured.err
    assert "ckpt=full" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_against_its_verdict_says_so_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestrator.device.visible_gpus", lambda: ())
    assert main([*TOO_LARGE, "oomguard.enforce=false", f"launch.runs_dir={tmp_path / 'runs'}"]) == 6
    said, refused = capsys.readouterr().err.splitlines()
    assert said.startswith("oomguard.enforce=false: goes on in spite of the verdict (does not fit: ")
    assert "this machine shows no GPU" in refused


def test_check_reads_the_margin_from_the_runs_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "model=tiny", "device=cpu", "output=json", f"launch.runs_dir={tmp_path}"]
    plan = output.as_json(*judge(run_spec(*words[1:])))
    peak, terms = plan["estimate"]["peak_device_bytes"], plan["estimate"]["terms"]
    tensors = peak - terms["context"] - terms["workspace"]
    for number in range(20):
        if number == 19:
            assert main(words) == 0
            assert "are measured, 19 so far" in json.loads(capsys.readouterr().out)["estimate"]["margin_source"]
        run_dir = tmp_path / f"run-{number}"
        recorded.planned(run_dir)
        share = 0.07 if number == 3 else -0.01
        recorded.train_report(run_dir, measured_peak_bytes=peak + int(tensors * share))
        (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    seen = "largest under-prediction of 20 measured runs of at least a quarter of its size, 7.0% of the tensors"
    assert found["margin_source"] == seen
    assert found["margin_bytes"] == pytest.approx(0.07 * tensors, rel=1e-3)


def test_explain_prints_the_ledger_behind_the_text_of_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=tiny", "device=a100_40gb"]) == 0
    text = capsys.readouterr().out
    for word in ("--explain", "output=explain"):
        assert main(["check", "model=tiny", "device=a100_40gb", word]) == 0
        explained = capsys.readouterr().out
        assert explained.startswith(text)
        assert "mlp_up" in explained[len(text) :]


def test_json_with_explain_holds_the_ledger_as_one_string(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "device=a100_40gb", "output=json"]
    assert main([*words, "model=tiny"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "model=tiny", "--explain"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert "mlp_up" in explained.pop("explain")
    assert explained == plain
    assert main([*words, "-m", "model=tiny,small", "--explain"]) == 0
    assert all("mlp_up" in job["explain"] for job in json.loads(capsys.readouterr().out))
    assert main([*words, "model=tiny", "train.compile=true", "--explain"]) == 4
    assert json.loads(capsys.readouterr().out)["explain"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--explian"], "--explian: there is no such flag. Did you mean --explain? Flags: --explain, "),
        (["check", "--explain=true"], "--explain=true: the flag takes no value. Write --explain"),
        (["check", "--multirum", "model=tiny,small"], "Did you mean --multirun?"),
        (["check", "-m=true"], "-m=true: the flag takes no value. Write -m"),
        (["check", "-x"], "-x: there is no such flag. Flags: "),
        (["check", "--wait=3"], "--wait=3: there is no such flag."),
        (["check", "--cfg"], "--cfg: the flag takes a value, as in --cfg job"),
        (["model=tiny", "--explain"], "--explain: run starts the run and explains nothing. Write check --explain"),
    ],
)
def test_a_flag_that_is_none_or_stands_wrong_is_named_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_all_wrong_flags_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--explian", "--multirum"]) == 2
    assert capsys.readouterr().err.startswith("2 errors in the config:\n")


def test_every_flag_of_hydras_is_known_and_no_other() -> None:
    flags = [(word, action.nargs) for action in get_args_parser()._actions for word in action.option_strings]
    assert {word for word, nargs in flags if nargs == 0} == set(config.PLAIN_FLAGS)
    assert {word for word, nargs in flags if nargs != 0} == {*config.VALUE_FLAGS, *config.DIR_FLAGS}


def test_an_unknown_peak_has_no_ledger_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=tiny", "device=a100_40gb", "train.compile=true"]) == 4
    text = capsys.readouterr().out
    assert main(["check", "model=tiny", "device=a100_40gb", "train.compile=true", "--explain"]) == 4
    assert capsys.readouterr().out == text


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=tiny", "device=a100_40gb", "output=json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"] == "fits"
    assert captured.err == ""


def test_json_under_multirun_is_a_list_and_the_exit_code_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-m", *TOO_LARGE[1:], "model=tiny,behemoth", "output=json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [job["choices"]["model"] for job in found] == ["tiny", "behemoth"]
    assert [job["verdict"] for job in found] == ["fits", "does_not_fit"]


def test_a_sweep_leaves_no_files_of_hydras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "-m", "model=tiny,small", "device=a100_40gb"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_gives_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestrator.device.visible_gpus", lambda: ())
    words = ["model=tiny", "device=a100_40gb", "output=json", f"launch.runs_dir={tmp_path}/runs"]
    assert main(words) == 6
    captured = capsys.readouterr()
    assert "this machine shows no GPU" in json.loads(captured.out)["error"]


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--help"], ["--info", "defaults"]])
def test_flags_of_hydra_print_and_run_nothing(flag: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "model=tiny", *flag, f"launch.runs_dir={tmp_path}/runs"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout or "Configuration groups" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m orchestrator --cfg job | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
