"""From overrides to a spec, and what a user is told when they are wrong."""

import shutil
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.config import _by_hydra, change, compose_jobs
from orchestrator.errors import ConfigError
from orchestrator.project import CONF_DIR
from tests.specs import run_spec, train_spec
from train.spec import TrainSpec

GROUPS = {path.name: path for path in sorted(CONF_DIR.iterdir()) if path.is_dir()}
OPTIONS = [(group, file.stem) for group, folder in GROUPS.items() for file in sorted(folder.glob("*.yaml"))]


def message(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `check` with these overrides says, once it exits with 2."""
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    extra = ("data.path=x",) if (group, option) == ("data", "text") else ()
    spec = run_spec(f"{group}={option}", *extra)
    assert spec.choices[group] == option


def test_a_spec_reads_back_as_it_was_written() -> None:
    spec = train_spec("model=llama3_8b", "device=h100_80gb", "ckpt=selective", "ckpt.layers=[0,3]")
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec


def test_the_run_is_named_for_its_model_policy_and_batch() -> None:
    assert run_spec("model=behemoth", "ckpt=selective", "train.micro_batch=2").name == "behemoth-selective-b2-t1024"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=behemot", ("model=behemot", "Did you mean behemoth?", "Choices: behemoth, gpt2")),
        ("ckpt=sel", ("ckpt=sel", "Did you mean selective?", "Choices: full, none, ops, selective")),
        ("launch=slurm", ("launch=slurm", "Choices: inline, local")),
        ("model.num_haeds=3", ("model.num_haeds=3", "there is no such key", "Did you mean model.num_heads?")),
        ("num_heads=3", ("num_heads=3", "Did you mean model.num_heads?")),
        ("+train.micro_bach=3", ("train.micro_bach=3", "Did you mean train.micro_batch?")),
        ("train.micro_batch=0", ("train.micro_batch=0", "greater than or equal to 1")),
        (
            "train.micro_batch=2.5",
            ("train.micro_batch=2.5: it is not a whole number. Set it to a whole number from 1",),
        ),
        ("optim.lr=fast", ("optim.lr=fast: it is not a number. Set it to a number above 0",)),
        ("optim.lr=inf", ("optim.lr=inf: it must be a finite number. Set it to a number above 0",)),
        ("oomguard.enforce=maybe", ("oomguard.enforce=maybe: it is neither true nor false. Set it to true or false",)),
        ("train.compile=null", ("train.compile=null: it is neither true nor false. Set it to true or false",)),
        ("train.dropout=2", ("train.dropout=2: it must be less than 1. Set it to a share from 0 to below 1",)),
        (
            "tracking.timeout_s=31",
            ("tracking.timeout_s=31: it must be less than or equal to 30. Set it to a number above 0 up to 30",),
        ),
        (
            "budget.max_device_memory_fraction=0",
            ("it must be greater than 0. Set it to a share above 0 up to 1",),
        ),
        ("optim.min_lr_fraction=-1", ("greater than or equal to 0. Set it to a share from 0 to 1",)),
        ("data.eval_fraction=1", ("it must be less than 1. Set it to a share above 0 and below 1",)),
        (
            "budget.max_steps=x",
            ("budget.max_steps=x: it is not a whole number. Set it to a whole number from 1 or null",),
        ),
        ("ckpt.layers=[0,x]", ("ckpt.layers=[0,x]: x is not a whole number. Set it to a list in brackets (each ",)),
        ("ckpt.layers=[0,-1]", ("ckpt.layers=[0,-1]: -1 must be greater than or equal to 0. Set it to a list",)),
        ("ckpt.layers=3", ("ckpt.layers=3: it is not a list. Set it to a list",)),
        ("tracking.tags=a", ("tracking.tags=a: it is not a list. Set it to a list in brackets (each item text)",)),
        ("data.path=5", ("data.path=5: it is not text, and it is not a list. Set it to text or a list in brackets",)),
        ("data.path={a:1}", ("data.path={a:1}: it is not text, and it is not a list. Set it to text",)),
        ("data.path=[1,[2,b]]", ("data.path=[1,[2,b]]: 1 is not text, and [2,b] is not text. Set it to text",)),
        (
            "train.eval=3",
            (
                "train.eval=3: it is a group of settings, not one value. ",
                "Set its keys: train.eval.every_steps, train.eval.sequences",
            ),
        ),
        (
            "ckpt.save=[attention,qk]",
            ("ckpt.save=[attention,qk]: qk is not one of the choices. Did you mean qkv? Choices: attention,",),
        ),
        ("ckpt.save={a:1}", ("ckpt.save={a:1}: it is not one of the choices. Choices: attention,",)),
        (
            "ckpt.save=[[attention]]",
            ("ckpt.save=[[attention]]: [attention] is not one of the choices. Did you mean attention?",),
        ),
        ("train.precision=fp16", ("train.precision=fp16", "Choices: bf16, bf16_mixed, fp32")),
        ("output=yaml", ("output=yaml", "Choices: explain, json, text")),
        ("data.path=x", ("data.path=x", "Set data=text")),
        ("ckpt.first=2", ("ckpt.first=2", "this run has ckpt=none", "Set ckpt=selective or ckpt=ops")),
        ("model.name=../esc", ("model.name=../esc: it is not of the form", "Set it to text that matches ^[A-Za-z0-9]")),
        ("model.d_model=???", ("model.d_model=???", "it has no value", "Set model.d_model=")),
        ("~train.seed", ("train.seed", "it has no value")),
        ("train.seq_len=${nope}", ("train.seq_len", "nope")),
        ("model=tiny,mega", ("model=tiny,mega", "Add -m")),
        ("train.micro_batch=[", ("train.micro_batch=[", "cannot be read")),
    ],
)
def test_a_wrong_override_is_named_with_what_would_be_right(
    override: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = message(capsys, override)
    for words in said:
        assert words in text
    assert len(text.strip().splitlines()) == 1


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = message(capsys, "model=tiny", "model.num_heads=7")
    assert text.startswith("model.num_heads=7: 7 heads do not divide model.d_model=128. Set it to ")
    assert "4, 8, 16, 32, 64 or 128" in text


def test_interpolations_are_resolved_in_values_and_kept_in_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=tiny", "train.seq_len=${model.head_dim}"]) == 0
    assert "tiny-none-b4-t32" in capsys.readouterr().out


def test_all_errors_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = message(
        capsys, "model=tiny", "model.num_heads=7", "train.micro_batch=0", "ckpt=ful", "optim.lr=abc", "foo.bar=1"
    )
    assert text.startswith("5 errors in the config:\n")
    for key in ("model.num_heads=7", "train.micro_batch=0", "ckpt=ful", "optim.lr=abc", "foo.bar=1"):
        assert key in text


def test_every_bad_value_of_a_sweep_is_reported_and_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = message(capsys, "-m", "model=tiny,meg,behemoht", "ckpt=none,ful")
    for word in ("3 errors", "model=meg", "model=behemoht", "ckpt=ful"):
        assert word in text
    text = message(capsys, "-m", "model=tiny", "train.micro_batch=2,0")
    assert text.startswith("train.micro_batch=0: ")


def test_options_of_a_folder_of_ones_own_are_found_and_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    text = (CONF_DIR / "model" / "tiny.yaml").read_text(encoding="utf-8").replace("name: tiny", "name: mine")
    (tmp_path / "model" / "mine.yaml").write_text(text, encoding="utf-8")
    assert main(["check", "-cd", str(tmp_path), "model=mine"]) == 0
    assert "mine-none" in capsys.readouterr().out
    assert "Did you mean mine?" in message(capsys, "-cd", str(tmp_path), "model=min")


def test_a_verb_that_does_not_exist_is_named_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chek", "model=tiny"]) == 2
    assert "chek: there is no such verb. Did you mean check?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["model=behemoth", "device=a100_40gb", "ckpt=selective", "ckpt.layers=[0,3]"],
        ["data=text", "data.path=${hydra:runtime.cwd}/x", "train.seq_len=${model.head_dim}"],
        ["experiment=first_run", "tracking.tags=[a,b]"],
    ],
)
def test_plain_overrides_composed_once_give_what_hydra_s_main_gives(argv: list[str]) -> None:
    assert compose_jobs(argv) == _by_hydra(argv)


def test_an_experiment_that_sweeps_by_itself_is_left_to_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CONF_DIR, tmp_path / "conf")
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      model: tiny,small\n"
    (tmp_path / "conf" / "experiment" / "both.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr("orchestrator.config.CONF_DIR", tmp_path / "conf")
    assert [spec.choices["model"] for spec in compose_jobs(["experiment=both"])] == ["tiny", "small"]


def test_a_later_override_wins_also_between_options_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ckpt=none", "model=tiny", "ckpt=full"]) == 0
    assert "tiny-full" in capsys.readouterr().out


def test_a_resume_may_change_only_what_is_not_the_training_itself() -> None:
    spec = run_spec("model=tiny")
    assert change(spec, ["budget.max_steps=7"], ("budget",)).train.budget.max_steps == 7
    with pytest.raises(ConfigError, match="it belongs to the training itself"):
        change(spec, ["model=mega"], ("budget",))
    with pytest.raises(ConfigError, match="it belongs to the training itself"):
        change(spec, ["model.num_layers=7"], ("budget",))
    with pytest.raises(ConfigError, match=r"Did you mean budget.max_steps\?"):
        change(spec, ["budget.max_stps=7"], ("budget",))
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        change(spec, ["budget.max_steps=0"], ("budget",))
    for value in ("[1", "a: b", "${x}"):
        with pytest.raises(ConfigError, match=r"budget\.max_steps"):
            change(spec, [f"budget.max_steps={value}"], ("budget",))


def test_a_resume_may_choose_another_option_of_a_group() -> None:
    spec = run_spec("model=tiny", "launch.runs_dir=elsewhere", "budget.max_steps=7")
    changed = change(spec, ["tracking=none", "launch=inline", "budget=smoke"], ("tracking", "launch", "budget"))
    assert changed.tracking.kind == "none"
    assert changed.choices["tracking"] == "none"
    assert (changed.launch.kind, changed.launch.runs_dir) == ("inline", "elsewhere")
    assert changed.train.budget.max_steps == 20
    with pytest.raises(ConfigError, match="tracking=mlflow: it is not one of the choices"):
        change(spec, ["tracking=mlflow"], ("tracking",))
