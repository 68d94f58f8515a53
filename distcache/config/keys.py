"""Which keys there are, and what is told about one that is none."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distcache.config.tree import Config
from distcache.errors import ConfigError

_ELSEWHERE = {
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), ("trainer.steps", "data.samples")),
    **dict.fromkeys(("learning_rate", "lr"), ("optim.dense_lr", "optim.embedding_lr")),
    **dict.fromkeys(("ranks", "nproc", "nproc_per_node"), ("world_size",)),
    **dict.fromkeys(("bf16", "fp16", "precision"), ("trainer.amp", "trainer.dtype")),
}
"""What other tools call a key, and what is meant."""

_REMOVED = {
    "cache.order": "numbering rows by popularity gained nothing and made plans slower",
    "analyze.memory": "every row is counted, in 8 bytes: less than its own values take",
    "reset_evicted": "TorchRec's managed collisions are not planned ahead any more",
    "planner_threads": "a prediction has one planner time per id, which measure=true measures "
    "(trainer.planner_threads sets the threads of a run)",
    "cache.admission": "rows that leave first unless they score higher changed next to nothing",
}
"""Removed keys and settings, with the reason or the successor."""


def is_known(key: str, schema: type = Config) -> bool:
    """Whether a value or section of `schema` has this dotted key, or it is of a mapping there."""
    kinds, parent = _kinds(schema), key.rpartition(".")[0]
    # A value that may be a mapping (data.weight_columns) has keys of its own below it.
    return key in kinds or (parent in kinds and not is_dataclass(kinds[parent]))


def is_section(key: str, schema: type = Config) -> bool:
    """Whether `key` has no value of its own, but keys below it."""
    return is_dataclass(_kinds(schema).get(key))


def no_such_key(keys: Sequence[str], schema: type = Config) -> ConfigError:
    """The error for unknown `keys`, with those that come near the first."""
    for key in keys:
        if (error := removed_key(key)) is not None:
            return error
    near = near_keys(keys[0], schema)
    hint = f"did you mean {' or '.join(near)}?" if near else "`--cfg job` shows all keys"
    return ConfigError(f"{', '.join(keys)}: no such key: {hint}")


def removed_key(key: str) -> ConfigError | None:
    """Return the error for a key, or setting of a collection, that was removed; None for others."""
    if key not in _REMOVED:
        return None
    return ConfigError(f"{key}: this key was removed ({_REMOVED[key]}): leave it out")


def near_keys(key: str, schema: type = Config) -> list[str]:
    """Keys that `key` may be meant for, likeliest first; sections only for a top-level one."""
    values = sorted(key for key in _kinds(schema) if not is_section(key, schema))
    section, _, name = key.rpartition(".")
    if all(meant in _kinds(schema) for meant in _ELSEWHERE.get(name, ("",))):
        return list(_ELSEWHERE[name])
    sections = [] if section else [key for key in _kinds(schema) if is_section(key, schema)]
    own = difflib.get_close_matches(name, own_keys(schema), n=1)
    own += difflib.get_close_matches(name, sections, n=1, cutoff=0.75)
    last = {value: value.rpartition(".")[2] for value in values}
    same = [value for value in values if last[value] == name]
    words = set(name.split("_"))
    part = [] if same else [value for value in values if words <= set(last[value].split("_"))]
    alike = difflib.get_close_matches(name, set(last.values()), n=3)
    close = [value for other in alike for value in values if last[value] == other]
    close.sort(key=lambda value: not value.startswith(f"{section}."))
    return list(dict.fromkeys([*own, *same, *part, *close]))[:3]


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of `settings` by dotted key, in whose sections there may be mappings.

    Raises ConfigError for keys that are none, sections given a plain value, and values of another
    type.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if not is_known(key):
            raise no_such_key([key])
        if not is_section(key):
            check_value(key, value)
            found[key] = value
        elif isinstance(value, Mapping):
            found |= flat_settings(value, f"{key}.")
        else:
            raise not_a_value(key, value)
    return found


def not_a_value(key: str, value: Any, schema: type = Config) -> ConfigError:
    """The error for a section that was given a value."""
    below = sorted(name for name in _kinds(schema) if name.startswith(f"{key}."))
    return ConfigError(
        f"{key}={value}: {key} is a section of {len(below)} keys: set one of them, such as "
        f"{below[0]}=..."
    )


def not_in_group(key: str, value: str, names: Sequence[str]) -> ConfigError:
    """The error for `key=value`, a group of which there is no such file: `names` are there."""
    near = difflib.get_close_matches(value, names, n=1)
    meant = f"did you mean {key}={near[0]}? " if near else ""
    return ConfigError(f"{key}={value}: no such {key}: {meant}there is {', '.join(names)}")


def keys_of(values: Mapping[Any, Any], prefix: str = "") -> set[str]:
    """Dotted keys of nested `values`, with those of the mappings in them."""
    found = {f"{prefix}{name}" for name in values}
    for name, value in values.items():
        found |= keys_of(value, f"{prefix}{name}.") if isinstance(value, Mapping) else set()
    return found


def check_value(key: str, value: Any, schema: type = Config) -> None:
    """ConfigError, in words, for a value that does not have the type of a known `key`."""
    try:
        OmegaConf.update(deepcopy(_tree(schema)), key, value)
    except (OmegaConfBaseException, ValueError) as error:  # ValueError: a name below a list
        raise ConfigError(f"{key}={value}: give {type_words(_type_of(key, schema))}") from error


def list_keys(schema: type) -> set[str]:
    """Dotted keys of a command's own lists, which may be typed without brackets."""
    return {
        key for key in own_keys(schema) if type_words(_type_of(key, schema)).startswith("a list")
    }


def own_keys(schema: type, prefix: str = "") -> dict[str, str]:
    """A command's own keys, those made by `option`, with their sentence for `--help`."""
    found = {}
    for f in fields(schema):
        if "help" in f.metadata:
            found[f"{prefix}{f.name}"] = f.metadata["help"]
        elif is_dataclass(kind := typing.get_type_hints(schema)[f.name]):
            found |= own_keys(kind, f"{prefix}{f.name}.")
    return found


def usage(schema: type) -> str:
    """A line for each of a command's own keys, with its default and what it means."""
    return "\n".join(
        _usage_of(key, OmegaConf.select(_tree(schema), key), text)
        for key, text in own_keys(schema).items()
    )


def usage_of_all(values: DictConfig) -> str:
    """A line for each key of a run, with its value in `values` and the docstring of its field."""
    texts = field_texts(Config)
    return "\n".join(
        _usage_of(key, OmegaConf.select(values, key, throw_on_resolution_failure=False), text)
        for key, text in texts.items()
    )


def _usage_of(key: str, value: Any, text: str) -> str:
    wrapped = textwrap.wrap(text, 62) or [""]
    first = f"  {f'{key}={_shown(value)}':35} "
    if len(first) > 38:  # the value leaves no room for the text
        return "\n".join([first.rstrip(), *(" " * 38 + line for line in wrapped)])
    return "\n".join([first + wrapped[0], *(" " * 38 + line for line in wrapped[1:])])


def field_texts(schema: type) -> dict[str, str]:
    """The docstrings of all values of a tree's sections, by dotted key; for a field without one
    the words that it may be."""
    texts: dict[str, str] = {}
    for section in fields(schema):
        kind = section.default_factory
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        # A docstring of a field is the expression after its assignment.
        after = {id(field): text for field, text in pairwise(body)}
        places = {field.target.id: field for field in body if isinstance(field, ast.AnnAssign)}
        for field in fields(kind):
            expression = after.get(id(places[field.name]))
            if isinstance(expression, ast.Expr):
                text = " ".join(ast.literal_eval(expression.value).split())
            else:
                text = f"One of {', '.join(field.metadata['choice'])}."
            texts[f"{section.name}.{field.name}"] = text
    return texts


def _shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, ListConfig):
        return f"[{','.join(map(_shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LISTS = {int: "whole numbers, [1,2]", float: "numbers, [0.1,0.2]", str: "names, [a,b]"}


def element_type(kind: Any) -> type | None:
    """The type of the elements of a field's type `list[...]`, also beside null; None for others."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is list:
            return typing.get_args(part)[0]
    return None


def type_words(kind: Any) -> str:
    """A field's type in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if own is type(None) else type_words(own) for own in arguments)
    if origin is list:
        return f"a list of {_LISTS.get(arguments[0], 'values')}"
    return _WORDS.get(kind, "keys with values" if origin is dict else "another value")


def _type_of(key: str, schema: type) -> Any:
    """The type of the field `key`, or of the mapping that it is in."""
    return _kinds(schema).get(key) or _kinds(schema)[key.rpartition(".")[0]]


@cache
def _tree(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


@cache
def _kinds(schema: type = Config, prefix: str = "") -> dict[str, Any]:
    """The types of all values and sections of a `schema` by dotted key."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(schema).items():
        found[f"{prefix}{name}"] = kind
        if is_dataclass(kind):
            found |= _kinds(kind, f"{prefix}{name}.")
    return found
