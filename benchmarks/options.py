"""Command lines of plain options: `key=value`, checked against a dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from distcache.errors import ConfigError

OptionsT = TypeVar("OptionsT")

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def option(default: Any, help: str, least: float | None = None, among: Sequence[str] = ()) -> Any:
    """A dataclass field with a sentence for `--help`; its type is that of `default`.

    `least`: of each number; `among`: what each value must be, and none twice.
    """
    return field(default=default, metadata={"help": help, "least": least, "among": among})


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: `given` by key, in order, and `overrides` for the configuration."""

    given: dict[str, str]
    overrides: tuple[str, ...]


def split_arguments(arguments: Sequence[str]) -> CommandLine:
    """`key=value` pairs; those with a dot in the key (`cache.lookahead=4`) are Hydra overrides.

    Raises ConfigError for an argument that is none.
    """
    given: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r} is not key=value: --help shows the keys")
        if "." in key:
            overrides.append(argument)
        else:
            given[key] = value
    return CommandLine(given, tuple(overrides))


def parse(cls: type[OptionsT], given: dict[str, str]) -> OptionsT:
    """An instance of the dataclass `cls` with the values given.

    A default of type tuple takes a comma-separated list. Raises ConfigError naming the key.
    """
    known: dict[str, Field] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values = {}
    for key, text in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"keys: {', '.join(known)}"
            raise ConfigError(f"{key}={text}: no such key: {hint}")
        values[key] = _value(key, text, known[key].default)
        _check(key, values[key], known[key].metadata)
    return cls(**values)


def _check(key: str, value: Any, rules: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that the rules of its option do not permit."""
    items = value if isinstance(value, tuple) else (value,)
    if rules["least"] is not None:
        at_least(rules["least"], **{key: min(items)})
    if rules["among"] and not set(items) <= set(rules["among"]):
        raise ConfigError(f"{key}={show(value)}: choose from {', '.join(rules['among'])}")
    if rules["among"] and len(set(items)) < len(items):
        raise ConfigError(f"{key}={show(value)} names one twice")


def _value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{key}={text} is not true or false")
        return text.lower() in _TRUE
    if isinstance(default, tuple):
        items = [part.strip() for part in text.split(",") if part.strip()]
        if not items:
            raise ConfigError(f"{key}={text}: give at least one value, separated by commas")
        return tuple(_value(key, item, default[0]) for item in items)
    kind = type(default)
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{key}={text} is not a value of type {kind.__name__}") from error


def usage(cls: type, module: str, purpose: str) -> str:
    """The text of `--help`."""
    lines = [f"python -m {module} [key=value ...]", "", purpose, ""]
    for f in fields(cls):
        default = "" if f.default is MISSING else show(f.default)
        names = ", ".join(f.metadata["among"])
        lines.append(
            f"  {f.name + '=' + default:34} {f.metadata['help']}{names and f' (of {names})'}"
        )
    return "\n".join(lines) + "\n"


def show(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return ",".join(show(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def at_least(least: float, /, **values: float) -> None:
    """Raise ConfigError for the first value below `least`."""
    for key, value in values.items():
        if value < least:
            raise ConfigError(f"{key}={value} must be at least {least}")
