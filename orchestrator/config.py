"""From the command line's overrides to a RunSpec, through Hydra and strict validation.

The only file that imports hydra or omegaconf. Raises ConfigError with all problems together.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from orchestrator.errors import ConfigError
from orchestrator.explain import first_line, leaves, not_a_choice, problems_of, unknown_flag, unknown_key
from orchestrator.project import CONF_DIR
from orchestrator.spec import LaunchSpec, OomguardSpec, RunSpec, TrackingSpec
from train.checks import problems
from train.spec import Problem, Spec, TrainSpec

_TRAIN_SECTIONS: dict[str, type[Spec]] = {
    name: field.annotation for name, field in TrainSpec.model_fields.items() if isinstance(field.annotation, type)
}
_SECTIONS = _TRAIN_SECTIONS | {"launch": LaunchSpec, "tracking": TrackingSpec, "oomguard": OomguardSpec}
_OUTPUTS = ("text", "json", "explain")
# Flags of Hydra that take the next word as their value.
VALUE_FLAGS = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun")
DIR_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_ALONE_TOO = ("--info", "-i")
"""Of these, the ones that may stand without it."""
PLAIN_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
)
"""Flags of Hydra that take none."""


def compose_jobs(argv: list[str]) -> list[RunSpec]:
    """The specs of argv, composed by Hydra: one, several under -m, none where a flag of Hydra's own printed.

    Nothing is started in between: a sweep with one bad job is refused as a whole. Raises ConfigError with all that a
    user can mend.
    """
    one = None if _speaks_to_hydra(argv) else _composed_once(argv)
    return _by_hydra(argv) if one is None else [one]


def check_flags(argv: list[str], ours: tuple[str, ...]) -> None:
    """Raise ConfigError with all flags that are neither Hydra's nor `ours`, which take no value.

    Hydra's own parser would print a usage that does not know ours, and exit.
    """
    plain, valued = (*ours, *PLAIN_FLAGS), (*VALUE_FLAGS, *DIR_FLAGS)
    found: list[Problem | str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if word in valued:
            if next(words, None) is None and word not in _ALONE_TOO:
                value = "job" if word in ("--cfg", "-c") else "..."
                found.append(f"{word}: the flag takes a value, as in {word} {value}")
        elif flag in plain and equals:
            found.append(f"{word}: the flag takes no value. Write {flag}")
        elif word.startswith("-") and flag not in (*plain, *valued):
            found.append(unknown_flag(word, [name for name in (*plain, *valued) if name.startswith("--")]))
    if found:
        raise ConfigError(found)


def _speaks_to_hydra(argv: list[str]) -> bool:
    """Whether there is a flag, or an override of Hydra's own settings."""
    return any(word.startswith("-") or word.lstrip("+~").startswith("hydra") for word in argv)


def _composed_once(argv: list[str]) -> RunSpec | None:
    """The one spec of plain overrides; None where an experiment asks Hydra for more than a composed config.

    hydra.main composes twice, first to look for hydra.mode.
    """
    try:
        cfg, choices = _compose(argv, [])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_diagnose(argv, error)) from error
    wanted = HydraConfig.get()
    return None if wanted.mode is RunMode.MULTIRUN or wanted.callbacks else to_spec(cfg, choices, tuple(argv))


def _by_hydra(argv: list[str]) -> list[RunSpec]:
    """The specs of argv by hydra.main, which knows its flags."""
    specs: list[RunSpec] = []
    invalid: list[Problem | str] = []

    def task(cfg: DictConfig) -> None:
        choices = {k: str(v) for k, v in HydraConfig.get().runtime.choices.items() if v is not None}
        typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # may hold ${...}
        assert isinstance(typed, list)
        try:
            specs.append(to_spec(cfg, choices, tuple(str(word) for word in typed)))
        except ConfigError as error:  # Hydra would print a line of its own
            invalid.extend(problem for problem in error.problems if problem not in invalid)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    scratch = tempfile.TemporaryDirectory(prefix="orchestrator-")  # Hydra leaves a multirun.yaml in sweep.dir
    sys.argv = ["orchestrator", *_flags_first([*argv, f"hydra.sweep.dir={scratch.name}"])]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    try:
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_diagnose(argv, error)) from error
    finally:
        scratch.cleanup()
        sys.argv = before[0]
        if before[1] is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
    if invalid:
        raise ConfigError(invalid)
    return specs


def to_spec(cfg: DictConfig, choices: Mapping[str, str], overrides: tuple[str, ...]) -> RunSpec:
    """The frozen spec of a composed config; its name lacks the date until a folder is claimed."""
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        content = None if missing else OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            [f"{error.full_key}: {first_line(error)}" if error.full_key else first_line(error)]
        ) from error
    if missing:
        raise ConfigError(
            [Problem(key=key, value="???", why="it has no value", fix=f"Set {key}=...") for key in missing]
        )
    assert isinstance(content, dict)
    return validate(
        {str(k): v for k, v in content.items()},
        {k: v for k, v in choices.items() if not k.startswith("hydra/")},
        overrides,
    )


def validate(content: dict[str, Any], choices: Mapping[str, str], overrides: tuple[str, ...]) -> RunSpec:
    """Check all sections, then what only shows across them; every problem is reported."""
    found: list[Problem] = []
    sections: dict[str, Spec] = {}
    for name, spec_type in _SECTIONS.items():
        try:
            sections[name] = spec_type.model_validate_json(json.dumps(content.get(name)))
        except ValidationError as error:
            found += problems_of(spec_type, name, content.get(name), error.errors())
    known = [*_SECTIONS, "output"]
    found += [unknown_key(key, content[key], known) for key in content if key not in known]
    if content.get("output") not in _OUTPUTS:
        found.append(not_a_choice("output", content.get("output"), _OUTPUTS))
    found += problems(sections)
    if found:
        raise ConfigError(found)
    train = TrainSpec.model_validate({name: sections[name] for name in _TRAIN_SECTIONS})
    stem = f"{train.model.name}-{train.ckpt.policy}-b{train.train.micro_batch}-t{train.train.seq_len}"
    return RunSpec.model_validate(
        {
            "name": stem,
            "choices": dict(choices),
            "overrides": overrides,
            "train": train,
            "launch": sections["launch"],
            "tracking": sections["tracking"],
            "oomguard": sections["oomguard"],
            "output": content["output"],
        }
    )


def change(spec: RunSpec, overrides: Iterable[str], allowed: tuple[str, ...]) -> RunSpec:
    """The spec with `key=value` and `group=option` overrides applied to its frozen values, for a resume.

    Only keys under `allowed` may change; raises ConfigError for the others, with the reason.
    """
    content = {name: getattr(spec.train, name).model_dump(mode="json") for name in _TRAIN_SECTIONS}
    for name in ("launch", "tracking", "oomguard"):
        content[name] = getattr(spec, name).model_dump(mode="json")
    config = OmegaConf.create(content | {"output": spec.output})
    choices = dict(spec.choices)
    found: list[Problem] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        option = CONF_DIR / key / f"{value}.yaml"
        if equals and key in allowed and key in choices and option.exists():
            _choose(config, choices, key, option)
        elif equals and key in choices and key in allowed:
            found.append(not_a_choice(key, value, (path.stem for path in (CONF_DIR / key).glob("*.yaml"))))
        elif not equals or OmegaConf.select(config, key, default=_ABSENT) is _ABSENT:
            found.append(unknown_key(key, value, leaves(content)))
        elif not any(key == name or key.startswith(f"{name}.") for name in allowed):
            fix = f"A resume may change {', '.join(allowed)}; start a new run for this"
            found.append(Problem(key=key, value=value, why="it belongs to the training itself", fix=fix))
        else:
            try:
                OmegaConf.update(config, key, OmegaConf.create({"v": None} | _yaml(value))["v"])
            except (YAMLError, OmegaConfBaseException) as error:
                why = f"it cannot be read as a value ({first_line(error)})"
                found.append(Problem(key=key, value=value, why=why, fix="Quote it for the shell and for YAML"))
    if found:
        raise ConfigError(found)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    changed = validate({str(k): v for k, v in plain.items()}, choices, spec.overrides)
    return changed.model_copy(update={"name": spec.name})


_ABSENT = object()


def _choose(config: DictConfig, choices: dict[str, str], group: str, option: Path) -> None:
    """Another option of a group; a run stays in its folder whatever launch says."""
    chosen = OmegaConf.load(option)
    if group == "launch":
        chosen.runs_dir = config.launch.runs_dir
    OmegaConf.update(config, group, chosen, merge=False)
    choices[group] = option.stem


def _yaml(value: str) -> dict[str, Any]:
    parsed = OmegaConf.to_container(OmegaConf.create(f"v: {value}"))
    assert isinstance(parsed, dict)
    return {str(k): v for k, v in parsed.items()}


def _diagnose(argv: list[str], error: Exception) -> list[Problem | str]:
    """All problems of these overrides, each once."""
    overrides, directories = _split_argv(argv)
    found: list[Problem | str] = []
    for job in _jobs(overrides):
        found += [problem for problem in _problems_of(job, directories) if problem not in found]
    return found or [_explain(error, overrides, directories)[0]]


def _problems_of(overrides: list[str], directories: list[str]) -> list[Problem | str]:
    """Find a problem, leave its override out, compose again, until what is left composes."""
    found: list[Problem | str] = []
    while True:
        try:
            cfg, choices = _compose(overrides, directories)
            to_spec(cfg, choices, tuple(overrides))
        except ConfigError as invalid:
            found += invalid.problems
        except (HydraException, OmegaConfBaseException, ValueError) as failure:
            problem, culprit = _explain(failure, overrides, directories)
            found.append(problem)
            if culprit is not None:
                overrides.remove(culprit)
                continue
        return found


def _jobs(overrides: list[str]) -> list[list[str]]:
    """The first job of a sweep, and one for each further value of each swept key."""
    values: list[list[str]] = []
    for override in overrides:
        try:
            parsed = OverridesParser.create().parse_override(override)
            swept = parsed.is_sweep_override()
            values.append([f"{parsed.get_key_element()}={v}" for v in parsed.sweep_string_iterator()] if swept else [])
        except (HydraException, OverrideParseException):
            values.append([])
    first = [found[0] if found else override for found, override in zip(values, overrides, strict=True)]
    others = [[*first[:i], v, *first[i + 1 :]] for i, found in enumerate(values) for v in found[1:]]
    return [first, *others]


def _flags_first(argv: list[str]) -> list[str]:
    """Hydra's flags with their values, then the overrides: its parser wants all overrides in one piece."""
    flags, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in VALUE_FLAGS + DIR_FLAGS:
            value = next(words, None)
            if value is not None:
                flags.append(value)
    return [*flags, "--", *overrides] if overrides else flags


def _split_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """Overrides, and the directories named by -cd."""
    overrides, directories = [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            directories.append(value if equals else next(words, ""))
        elif word in VALUE_FLAGS + DIR_FLAGS:
            next(words, None)
        elif not word.startswith("-"):
            overrides.append(word)
    return overrides, directories


def _compose(overrides: list[str], directories: list[str]) -> tuple[DictConfig, dict[str, str]]:
    paths = ",".join(f"file://{Path(d).absolute()}" for d in directories)
    extra = [f"hydra.searchpath=[{paths}]"] if directories else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("config", [*overrides, *extra], return_hydra_config=True)
    choices = {k: str(v) for k, v in cfg.hydra.runtime.choices.items() if v is not None}
    HydraConfig.instance().set_config(cfg)
    plain = cfg.copy()
    OmegaConf.set_struct(plain, False)
    del plain["hydra"]
    return plain, choices


def _explain(failure: Exception, overrides: list[str], directories: list[str]) -> tuple[Problem | str, str | None]:
    """The problem in our words, and the override to blame if one can be told."""
    text = str(failure)
    if isinstance(failure, MissingConfigException) and failure.missing_cfg_file:
        group, _, option = str(failure.missing_cfg_file).rpartition("/")
        return not_a_choice(group, option, failure.options or ()), _blame(overrides, group, option)
    if isinstance(failure, OverrideParseException):
        reason = f"it cannot be read as key=value ({first_line(failure)})"
        problem = Problem(key=failure.override, value="", why=reason, fix="Quote it for the shell and for Hydra")
        return f"{failure.override}: {problem.why}. {problem.fix}", _blame(overrides, failure.override, None)
    several = re.match(r"Ambiguous value for argument '(.*)'", text)
    if several:
        key = several.group(1).partition("=")[0]
        return f"{several.group(1)}: it has several values. Add -m for a sweep over them, or write {key}=[...]", None
    named = re.search(r"Could not override '([^']+)'", text) or re.search(r"merging override ([^\s=]+)", text)
    if named:
        key = named.group(1).partition("@")[0]
        culprit = _blame(overrides, key, None)
        value = culprit.partition("=")[2] if culprit else ""
        default, _ = _compose([], directories)
        content = OmegaConf.to_container(default)
        assert isinstance(content, dict)
        known = leaves({str(k): v for k, v in content.items()})
        if key not in known:
            return unknown_key(key, value, known), culprit
        return Problem(key=key, value=value, why=first_line(failure.__cause__ or failure), fix=""), culprit
    return first_line(failure), None


def _blame(overrides: list[str], key: str, option: str | None) -> str | None:
    for override in overrides:
        name, _, value = override.partition("=")
        if override == key or (name.lstrip("+~").partition("@")[0] == key and option in (None, value)):
            return override
        if option is not None and name.lstrip("+~") == key and option in value.split(","):
            return override
    return None
