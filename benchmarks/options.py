"""Command lines of the benches: `key=value`, checked against a dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from distcache.errors import ConfigError

OptionsT = TypeVar("OptionsT")

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def option(default: Any, help: str, least: float | None = None, among: Sequence[str] = ()) -> Any:
    """A dataclass field with a sentence for `--help`; its type is that of `default`.

    `least`: of each number; `among`: what each value must be, and none twice.
    """
    return field(default=default, metadata={"help": help, "least": least, "among": among})


def parse(cls: type[OptionsT], arguments: Sequence[str]) -> tuple[OptionsT, tuple[str, ...]]:
    """An instance of the dataclass `cls` with the values given, and the arguments that are Hydra
    overrides: those with a dot in the key (`cache.lookahead=4`).

    A default of type tuple takes a comma-separated list. Raises ConfigError naming the key.
    """
    known: dict[str, Field] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values, overrides = {}, []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r} is not key=value: --help shows the keys")
        if "." in key:
            overrides.append(argument)
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"keys: {', '.join(known)}"
            raise ConfigError(f"{argument}: no such key: {hint}")
        values[key] = _checked(known[key], text)
    return cls(**values), tuple(overrides)


def _checked(of: Field, text: str) -> Any:
    """The value of an option; ConfigError for one that its type or its rules do not permit."""
    many, least, among = isinstance(of.default, tuple), of.metadata["least"], of.metadata["among"]
    texts = [part.strip() for part in text.split(",") if part.strip()] if many else [text]
    if not texts:
        raise ConfigError(f"{of.name}={text}: give at least one value, separated by commas")
    items = [_value(of.name, item, of.default[0] if many else of.default) for item in texts]
    if least is not None and min(items) < least:
        raise ConfigError(f"{of.name}={min(items)} must be at least {least}")
    if among and not set(items) <= set(among):
        raise ConfigError(f"{of.name}={text}: choose from {', '.join(among)}")
    if among and len(set(items)) < len(items):
        raise ConfigError(f"{of.name}={text} names one twice")
    return tuple(items) if many else items[0]


def _value(key: str, text: str, default: Any) -> Any:
    """One value of the type of `default`."""
    if isinstance(default, bool):
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{key}={text} is not true or false")
        return _BOOLEANS[text.lower()]
    try:
        return type(default)(text)
    except ValueError as error:
        kind = type(default).__name__
        raise ConfigError(f"{key}={text} is not a value of type {kind}") from error


def usage(cls: type, module: str, purpose: str) -> str:
    """The text of `--help`."""
    lines = [f"python -m {module} [key=value ...]", "", purpose, ""]
    for f in fields(cls):
        names = f" (of {', '.join(f.metadata['among'])})" if f.metadata["among"] else ""
        lines.append(f"  {f.name + '=' + show(f.default):34} {f.metadata['help']}{names}")
    return "\n".join(lines) + "\n"


def show(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return ",".join(map(show, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
