"""What pydantic and OmegaConf object to, in the words of the config: key as typed, value, why, choices, "did you mean".

Takes errors and keys, gives Problems. It must not import torch, hydra or omegaconf.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from train.spec import Problem, Spec


def leaves(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All keys of a nested mapping, dotted, those of the mappings in between included."""
    names = []
    for key, value in content.items():
        names.append(f"{prefix}{key}")
        if isinstance(value, dict):
            names += leaves(value, f"{prefix}{key}.")
    return names


def problem_of(spec_type: type[Spec], section: str, details: ErrorDetails) -> Problem:
    """One pydantic error in the words of the config."""
    path = [section, *(str(part) for part in details["loc"])]
    key = ".".join(part for part in path if not re.fullmatch(r"tuple.*|str|int|function.*", part))
    value = details["input"]
    if details["type"] == "extra_forbidden":
        return unknown_key(key, value, [f"{section}.{name}" for name in spec_type.model_fields])
    if details["type"] == "missing":
        return Problem(key=key, value="???", why="it has no value", fix=f"Set {key}=...")
    if details["type"] == "literal_error":
        return not_a_choice(key, value, re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", ""))))
    why = details["msg"][0].lower() + details["msg"][1:]
    return Problem(key=key, value=shown(value), why=why.replace("input should be", "it must be"), fix="")


def shown(value: object) -> str:
    """A value as YAML writes it."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def not_a_choice(key: str, value: object, choices: Iterable[str]) -> Problem:
    """A value that is none of the choices, with the nearest one."""
    choices = sorted(choices)
    close = _nearest(shown(value), choices)
    hint = f"Did you mean {close}? " if close else ""
    return Problem(
        key=key,
        value=shown(value),
        why="it is not one of the choices",
        fix=f"{hint}Choices: {', '.join(choices)}",
    )


def unknown_key(key: str, value: object, known: Iterable[str]) -> Problem:
    """A key that does not exist, with the nearest one or those beside it."""
    known = list(known)
    close = _nearest(key, known) or _by_last_part(key, known)
    siblings = sorted(k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0])
    top = sorted(k for k in known if "." not in k)
    fix = f"Did you mean {close}?" if close else f"Keys there: {', '.join(siblings or top or known)}"
    return Problem(key=key, value=shown(value), why="there is no such key", fix=fix)


def _by_last_part(key: str, known: list[str]) -> str | None:
    last = {name.rpartition(".")[2]: name for name in known}
    near = _nearest(key.rpartition(".")[2], list(last))
    return None if near is None else last[near]


def _nearest(typed: str, names: list[str]) -> str | None:
    """The name that was meant: one that looks alike, or the only one that begins so."""
    close = get_close_matches(typed, names, n=1)
    begins = [name for name in names if typed and name.startswith(typed)]
    return close[0] if close else begins[0] if len(begins) == 1 else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
