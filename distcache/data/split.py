"""A source whose batches stay as they are, each trained as a hot and a cold part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distcache.popularity.hot import HotSet


class SplitSource:
    """`source` with the hot set that splits its batches; all else is `source`'s own.

    What is hot is part of the run's identity: the sums of a step depend on it.
    """

    def __init__(self, source: Any, hot: HotSet) -> None:
        self.source, self.hot = source, hot

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # asked for before there is one, by copy and pickle
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def identity(self) -> Mapping[str, str]:
        """See `BatchSource.identity`."""
        own = {"data.batching": "split", "data.hot_rows": self.hot.named}
        return dict(self.source.identity) | own
