"""Reads every key of a configuration file from the sections themselves: type, range, default and meaning."""

import ast
import difflib
import inspect
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gspo.settings import Range
from gspo_services.shared.settings.sections import EvaluationSet, Settings

RENAMED: Final[Mapping[str, str]] = {
    "run.take_turns": "run.colocate",
    "learner.meeting_address": "learner.rendezvous_address",
    "learner.token_budget": "learner.max_tokens_per_micro_batch",
    "objective.mismatch_mode": "objective.tis_mode",
    "objective.mismatch_cap": "objective.tis_cap",
    "objective.mismatch_token_cap": "objective.tis_token_cap",
    "objective.mismatch_product_cap": "objective.tis_product_cap",
    "sandbox.patience_s": "sandbox.acquire_timeout_s",
    "sandbox.places": "sandbox.max_sandboxes",
    "sandbox.spare": "sandbox.warm",
    "lora.targets": "lora.target_modules",
    "lora.loaded": "lora.max_loaded_loras",
    "data.max_left_out": "data.max_filtered",
    "learner.record_tokens": "learner.dump_tokens",
    "agent.template_arguments": "model.template_arguments",
}
"""Keys that a release has renamed, section.old to section.new. An old name is an error that says the new one."""

_ONE_BROKER: Final = (
    "a run has one broker, which carries 1,000 rollouts (docs/scale.md): leave the key out. Against the loss of its machine "
    "there is a standby: broker.database (docs/guide/brokers.md)"
)
REMOVED: Final[Mapping[str, str]] = {"broker.num_brokers": _ONE_BROKER, "broker.number": _ONE_BROKER}
"""Keys that a release has taken away, and what to do without them. Such a key is an error."""

FORMERLY: Final[Mapping[str, Any]] = {"learner.spread_masters": False}
"""New keys whose default is not what a run did before: what it did, for a settings.json without them."""

_NAMES: Final[dict[Any, str]] = {
    bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "secret text",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    name: str
    """section.key"""
    type: str
    default: Any
    """As settings.json stores it; None: not set."""
    meaning: str


def section_names() -> tuple[str, ...]:
    """Return the sections in the order of the file."""
    return tuple(Settings.model_fields)


def section_of(name: str) -> type:
    """Return the class that defines a section."""
    section = Settings.model_fields[name].annotation
    assert isinstance(section, type)
    return section


def defining_classes(section: str) -> tuple[type, ...]:
    """Return the classes whose bodies hold the keys of a section: its own, and those that it inherits keys from."""
    return tuple(
        base
        for base in section_of(section).__mro__
        if vars(base).get("__annotations__") and base.__module__.partition(".")[0] not in ("pydantic", "builtins")
    )


TABLES: Final[dict[str, type]] = {"evaluation.sets": EvaluationSet}
"""Keys whose value is a table of tables with names that a user chooses, and the class of each."""


def table_keys(table: str) -> dict[str, Key]:
    """Return the keys of each inner table of one of TABLES, by their names below it."""
    section = TABLES[table]
    fields, meanings = _fields(section), _meanings_of(section)
    return {
        name: Key(
            name=f"{table}.NAME.{name}",
            type=_type_text(field.annotation, field.metadata),
            default=field.default,
            meaning=meanings.get(name, ""),
        )
        for name, field in fields.items()
    }


def key_names(section: str) -> tuple[str, ...]:
    """Return the keys of one section, in the order of the file; none for a section that does not exist."""
    return tuple(_fields(section_of(section))) if section in section_names() else ()


def names_in(location: Sequence[str]) -> tuple[str, ...]:
    """Return the names allowed at ``location``: sections, the keys of one, or those of a table that is a key's value."""
    if len(location) < 2:
        return section_names()
    if len(location) > 3 and ".".join(location[:2]) in TABLES:
        return tuple(table_keys(".".join(location[:2])))
    if len(location) > 2 and location[1] in key_names(location[0]):
        annotation = _fields(section_of(location[0]))[location[1]].annotation
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return tuple(kind.model_fields)
    return key_names(location[0])


@cache
def all_keys() -> dict[str, Key]:
    """Return all settings by section.key, in the order of the file."""
    defaults = Settings().model_dump(mode="json")
    return {
        f"{section}.{name}": Key(
            name=f"{section}.{name}",
            type=_type_text(field.annotation, field.metadata),
            default=defaults[section][name],
            meaning=_meanings(section).get(name, ""),
        )
        for section in section_names()
        for name, field in _fields(section_of(section)).items()
    }


def purpose(section: str) -> str:
    """Return the purpose of a section: the first paragraph of its class."""
    return inspect.cleandoc(section_of(section).__doc__ or "")


def close_match(word: str, known: Sequence[str], otherwise: Sequence[str] | None = None) -> str:
    """Return a hint for a misspelt word: the closest one, or all that are known (or ``otherwise``)."""
    close = difflib.get_close_matches(word[:64], known, n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(otherwise or known))


def value_text(value: Any) -> str:
    """Format a value as TOML; a value that is not set has none."""
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _fields(section: type) -> dict[str, FieldInfo]:
    # Models and pydantic's dataclasses both have it.
    fields: dict[str, FieldInfo] = vars(section)["__pydantic_fields__"]
    return fields


def _meanings(section: str) -> dict[str, str]:
    """Return the text below each field, in the class and in those that it inherits from."""
    return _meanings_of(*defining_classes(section))


def _meanings_of(*classes: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(classes):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = " ".join(meaning.split())
    return found


def _type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0], arguments[1:])
    if origin is Literal:
        return "one of " + ", ".join(value_text(choice) for choice in arguments)
    if origin in (Union, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        return f"{_type_text(inner, metadata)}, or not set"
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin is tuple:
        (inner,) = set(arguments)
        return f"list of {len(arguments)}: {_type_text(inner)}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table of " + ", ".join(annotation.model_fields)
    bounds = ", ".join(bound for constraint in metadata for bound in _bounds(constraint))
    return f"{_NAMES[annotation]}{f', {bounds}' if bounds else ''}"


def _bounds(constraint: Any) -> list[str]:
    match constraint:
        case FieldInfo(metadata=metadata):
            return [bound for each in metadata for bound in _bounds(each)]
        case Range(low=low, high=high, low_open=low_open):
            lower = [f"{'above' if low_open else 'at least'} {low:g}"] if math.isfinite(low) else []
            return [*lower, *([f"below {high:g}"] if math.isfinite(high) else [])]
        # pydantic keeps each bound in a separate object.
        case object(gt=low):
            return [f"above {low}"]
        case object(ge=low):
            return [f"at least {low}"]
        case object(lt=high):
            return [f"below {high}"]
        case object(le=high):
            return [f"at most {high}"]
    return []
