"""The configuration: its tree, the rules of its values, its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field as dataclass_field
from dataclasses import fields, is_dataclass
from typing import Any


def ruled(default: Any, **metadata: Any) -> Any:
    """A field with rules: `choice`, `least`, `counted` (`auto` or a whole number of at least that),
    `all_or` (`all` or such a number),
    `share` (its default, or a number within such bounds as `(0, 1]`), `only` (see `only_of`)."""
    if isinstance(default, list):
        return dataclass_field(default_factory=lambda: list(default), metadata=metadata)
    return dataclass_field(default=default, metadata=metadata)


def option(default: Any, help: str, **rule: Any) -> Any:
    """A field of a command's own keys with a sentence for `--help`, and a rule as those below.

    `positional=True`: an argument without `key=` is a value of this key.
    """
    return ruled(default, help=help, **rule)


def choice(*words: str, default: str | None = None) -> Any:
    """A field that is one of `words`, by default the first."""
    return ruled(words[0] if default is None else default, choice=words)


def least(bound: float, default: Any) -> Any:
    """A field that is a number of at least `bound`; null where its type allows that."""
    return ruled(default, least=bound)


def only_of(default: Any, *words: str, by: str = "name", **rule: Any) -> Any:
    """A field that is read where the field `by` of its section is one of `words`."""
    return ruled(default, only=words, by=by, **rule)


def rules_of(tree: type) -> dict[str, Mapping[str, Any]]:
    """What the fields of a tree's sections say about their values, by dotted key."""
    sections = {f.name: f.default_factory for f in fields(tree)}
    return {
        f"{name}.{f.name}": f.metadata
        for name, part in sections.items()
        if is_dataclass(part)
        for f in fields(part)
    }
