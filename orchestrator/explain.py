"""What pydantic and OmegaConf object to, in the words of the config: key as typed, value, why, choices, "did you mean".

Takes errors and keys, gives Problems. It must not import torch, hydra or omegaconf.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from train.spec import Problem, Spec, as_typed


def leaves(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All keys of a nested mapping, dotted, those of the mappings in between included."""
    names = []
    for key, value in content.items():
        names.append(f"{prefix}{key}")
        if isinstance(value, dict):
            names += leaves(value, f"{prefix}{key}.")
    return names


def problems_of(spec_type: type[Spec], section: str, content: object, errors: Iterable[ErrorDetails]) -> list[Problem]:
    """Pydantic's errors of a section with this content in the words of the config; one problem for one fix of a key."""
    found: dict[tuple[str, str], list[_Objection]] = {}
    for details in errors:
        objection = _objection(spec_type, section, content, details)
        found.setdefault((objection.problem.key, objection.problem.fix), []).append(objection)
    return [_together(objections) for objections in found.values()]


@dataclass(frozen=True, kw_only=True)
class _Objection:
    """One error, and whether it is to an item of a list."""

    problem: Problem
    to_item: bool


def _together(objections: list[_Objection]) -> Problem:
    """Objections with one fix: where some are to items, a list was right, whatever else the key may be."""
    items = [each for each in objections if each.to_item]
    said = list(dict.fromkeys(each.problem.why for each in items or objections))
    return objections[0].problem.model_copy(update={"why": ", and ".join(said)})


def _objection(spec_type: type[Spec], section: str, content: object, details: ErrorDetails) -> _Objection:
    """The key is that of the innermost setting: what is inside a list has no key that one could type."""
    path, value, item = [section], content, False
    for part in details["loc"]:
        item = item or isinstance(part, int)
        if isinstance(part, str) and not item and not _ALTERNATIVE.fullmatch(part):
            path.append(part)
            value = value.get(part) if isinstance(value, Mapping) else None
    key, kind = ".".join(path), details["type"]
    if kind == "extra_forbidden":
        beside = ".".join(path[:-1])
        known = [f"{beside}.{name}" for name in _properties(spec_type, path[1:-1])]
        return _Objection(problem=unknown_key(key, value, known), to_item=False)
    if kind == "missing":
        return _Objection(
            problem=Problem(key=key, value="???", why="it has no value", fix=f"Set {key}=..."), to_item=False
        )
    subject = shown(details["input"]) if item else "it"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
        fix = not_a_choice(key, details["input"], choices).fix
        why = f"{subject} is not one of the choices"
    else:
        why = f"{subject} {_objected(kind, details['msg'])}"
        fix = _to_set(spec_type, path)
    return _Objection(problem=Problem(key=key, value=shown(value), why=why, fix=fix), to_item=item)


_ALTERNATIVE = re.compile(r"tuple.*|str|int|function.*")
"""What pydantic calls the kinds a value may be of, in the path of an error."""
_KINDS = {
    "bool": "is neither true nor false",
    "int": "is not a whole number",
    "float": "is not a number",
    "string": "is not text",
    "list": "is not a list",
    "tuple": "is not a list",
    "model": "is a group of settings, not one value",
    "dict": "is a group of settings, not one value",
}


def _objected(kind: str, message: str) -> str:
    """What pydantic objects to, as what is said of a value."""
    named, _, what = kind.partition("_")
    if what in ("type", "parsing", "from_float") and named in _KINDS:
        return _KINDS[named]
    if kind == "string_pattern_mismatch":  # what it has to match is what to set
        return "is not of the form that is asked for"
    return re.sub(r"^\w+ should ", "must ", message[0].lower() + message[1:])


def _to_set(spec_type: type[Spec], path: list[str]) -> str:
    """What may be set there: kind and bounds of the field."""
    schema = spec_type.model_json_schema()
    field = _field(schema, path[1:])
    if "properties" in field:
        return f"Set its keys: {', '.join('.'.join([*path, name]) for name in field['properties'])}"
    return f"Set it to {_wanted(field)}"


def _field(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The schema of a field of a field, references followed."""
    field = schema
    for name in names:
        field = field["properties"][name]
        reference = field.get("$ref")
        field = schema["$defs"][reference.rpartition("/")[2]] if reference else field
    return field


def _properties(spec_type: type[Spec], names: list[str]) -> list[str]:
    return list(_field(spec_type.model_json_schema(), names)["properties"])


def _wanted(field: dict[str, Any]) -> str:
    """A field's JSON schema in words: true or false, a whole number from 1, a share from 0 to below 1, or null."""
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(map(_wanted, options))
    if "enum" in field:
        return f"one of {', '.join(field['enum'])}"
    kind = field["type"]
    if kind in ("integer", "number"):
        return _number(field)
    if kind == "array":
        return f"a list in brackets (each item {_wanted(field['items'])})"
    if kind == "string" and "pattern" in field:
        return f"text that matches {field['pattern']}"
    return {"boolean": "true or false", "string": "text", "object": "key: value pairs in braces", "null": "null"}[kind]


def _number(field: dict[str, Any]) -> str:
    """A number between its bounds; a share is one of at most 1."""
    least, above = field.get("minimum"), field.get("exclusiveMinimum")
    most, below = field.get("maximum"), field.get("exclusiveMaximum")
    share = 1 in (most, below) and 0 in (least, above)
    noun = "a whole number" if field["type"] == "integer" else "a share" if share else "a number"
    bounds = [] if least is None else [f"from {least}"]
    bounds += [] if above is None else [f"above {above}"]
    bounds += [] if most is None else [f"to {most}" if above is None else f"up to {most}"]
    bounds += [] if below is None else [f"to below {below}" if above is None else f"and below {below}"]
    return " ".join([noun, *bounds])


def shown(value: object) -> str:
    """A value as one types it behind `key=`."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    return as_typed(value)


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


def unknown_flag(word: str, known: list[str]) -> str:
    """A flag that does not exist, with the nearest one."""
    close = _nearest(word.partition("=")[0], known)
    hint = f" Did you mean {close}?" if close else ""
    return f"{word}: there is no such flag.{hint} Flags: {', '.join(known)}"


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
