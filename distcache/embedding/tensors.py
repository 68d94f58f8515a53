"""Tables and ids as torch.nn has them: a table of a module of its own, and plain tensors of ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distcache.data.batch import JaggedIds
from distcache.embedding.ids import IdReader, Lookups, ReadIds, search, version_of
from distcache.errors import ConfigError, DataError

_WHOLE = (torch.int64, torch.int32)


@dataclass
class PlainTable:
    """The table of a module, of `shape` (rows, width); `given`: its first weights, where they are
    not drawn, in `dtype`, as torch.nn does. `padding_idx`: the row that is zero then."""

    name: str
    shape: tuple[int, int]
    pooling: str
    padding_idx: int | None
    dtype: torch.dtype
    given: Tensor | None

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, int],
        pooling: str,
        padding_idx: int | None,
        dtype: torch.dtype | None,
        given: Tensor | None,
    ) -> PlainTable:
        """From a module's arguments; raises ConfigError for those that contradict each other."""
        rows = shape[0]
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ConfigError(f"padding_idx={padding_idx} is not within num_embeddings={rows}")
        if given is not None and tuple(given.shape) != shape:
            raise ConfigError(f"_weight of shape {list(given.shape)}, not {list(shape)}")
        pad = None if padding_idx is None else padding_idx % rows
        known = torch.get_default_dtype() if given is None else given.dtype
        return cls(name, shape, pooling, pad, known if dtype is None else dtype, given)

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Width."""
        return self.shape[1]

    @property
    def data_type(self) -> str:
        """Of the stored rows, as TorchRec names it; those of half precision are updated in
        float32."""
        return {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(self.dtype, "FP32")

    @property
    def feature_names(self) -> list[str]:
        """What reads it: the module's input."""
        return [self.name]

    def init_fn(self, weight: Tensor) -> None:
        """Fill the first weights."""
        if self.given is not None:
            weight.copy_(self.given)
            return
        nn.init.normal_(weight)
        if self.padding_idx is not None:
            weight[self.padding_idx].zero_()


@dataclass(frozen=True, eq=False)
class TensorIds:
    """What a module is called with: ids, where bags of them begin, and weights of them."""

    input: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, given: Any) -> TensorIds:
        """From what a function of the user's gives of a batch: `input`, or the arguments."""
        parts = given if isinstance(given, tuple | list) else (given,)
        return given if isinstance(given, TensorIds) else cls(*parts[:3])

    def __post_init__(self) -> None:
        for own in (self.input, self.offsets):
            if own is not None and not (isinstance(own, Tensor) and own.dtype in _WHOLE):
                raise DataError(
                    f"ids or offsets of {getattr(own, 'dtype', type(own).__name__)}: give tensors "
                    "of int64 or int32, as the module is called with, and lookahead(..., "
                    "ids=lambda batch: ...) too: input, or (input, offsets)"
                )
        if self.weights is not None and self.weights.shape != self.input.shape:
            raise DataError(
                f"per_sample_weights of shape {list(self.weights.shape)} for input of shape "
                f"{list(self.input.shape)}: give one for each id"
            )

    def values(self) -> Tensor:
        """The ids `[n]`."""
        return self.input.reshape(-1)

    def weights_or_none(self) -> Tensor | None:
        """Their weights `[n]`."""
        return None if self.weights is None else self.weights.reshape(-1)


class ReadTensors(ReadIds):
    """`TensorIds` as they were read. Tensors are recognised, and slices of the same memory."""

    def is_of(self, features: Any) -> bool:
        """Whether these are the same tensors."""
        source: Any = self.source
        return _is_same(features.input, source.input) and _is_same(features.offsets, source.offsets)

    def is_unchanged(self, features: Any, read: Callable[..., ReadIds]) -> bool:
        """Whether they still have the ids that were read; of those on a device, whether torch's
        functions have left them alone, for which nobody waits."""
        if features.input.device.type != "cpu":
            return self._is_untouched()
        return self.has_ids_of(features, read)

    def has_ids_of(self, features: Any, read: Callable[..., ReadIds]) -> bool:
        """Whether other tensors have the ids that were read, in the same places."""
        one, other = self.taken, read(features).taken
        both = one is not None and other is not None
        alike = torch.equal(one, other) if both else one is other
        return alike and super().has_ids_of(features, read)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are one in memory, which the second keeps."""
    if one is None or other is None or one is other:
        return one is other
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    return places[0] == places[1] and one.data_ptr() != 0  # as of tensors that lie elsewhere


class TensorReader(IdReader):
    """Reads the ids of a module. Those of `padding_idx` are left out; `pooled`: whether bags come
    out; `to_end`: whether the last of the offsets is the end of the last bag."""

    def __init__(
        self, lookups: Lookups, pooled: bool, padding_idx: int | None, to_end: bool
    ) -> None:
        super().__init__(lookups, pooled)
        self._padding_idx, self._to_end = padding_idx, to_end

    def find(self, batch: Any) -> Any:
        """The one tensor of whole numbers in a batch. Raises ConfigError where that is not one."""
        found = {id(one): one for one in search(batch, Tensor) if one.dtype in _WHOLE}
        if len(found) == 1:
            return next(iter(found.values()))
        raise ConfigError(
            f"a batch of type {type(batch).__name__} has {len(found)} tensors of whole numbers: "
            "tell lookahead which are the ids of a module, lookahead(batches, module, "
            "ids=lambda batch: batch[0]), or ids={module: lambda batch: ..., other: ...}"
        )

    def read(self, given: Any) -> ReadTensors:
        """The ids and their bags, on the CPU. Raises DataError for others than torch.nn takes."""
        found = TensorIds.of(given)
        tensors = [own for own in (found.input, found.offsets) if own is not None]
        versions = tuple((own, version_of(own)) for own in tensors)
        ids = found.values().detach().to("cpu", torch.int64, copy=True)  # buffers may be reused
        ends = self._ends(found, len(ids))
        taken, pad = None, self._padding_idx
        if pad is not None and bool((ids == pad).any()):
            kept, before = ids != pad, torch.zeros(len(ids) + 1, dtype=torch.int64)
            taken = kept.nonzero().flatten()
            torch.cumsum(kept, 0, out=before[1:])
            ids, ends = ids[taken], before[ends]
        if not self._pooled:
            ends = torch.arange(len(ids) + 1)
        joined = JaggedIds(self.lookups.features, ids, ends, None)
        return ReadTensors(found, joined, taken, (joined.batch_size,), versions, None)

    def _ends(self, found: TensorIds, count: int) -> Tensor:
        """`[b + 1]`: where bags begin, and the end of the last one."""
        input, offsets = found.input, found.offsets
        if not self._pooled:
            return torch.tensor([0, count])
        if input.dim() == 2 and offsets is None:
            return torch.arange(len(input) + 1) * input.shape[1]
        if input.dim() != 1 or offsets is None or offsets.dim() != 1:
            shape = None if offsets is None else list(offsets.shape)
            raise DataError(
                f"input of shape {list(input.shape)} with offsets of shape {shape}: give ids [n] "
                "with offsets [b], or ids [b, n] without"
            )
        ends = offsets.detach().to("cpu", torch.int64, copy=True)
        if not self._to_end:
            ends = torch.cat([ends, torch.tensor([count])])
        fits = len(ends) and not int(ends[0]) and int(ends[-1]) == count
        if not fits or bool((ends.diff() < 0).any()):
            raise DataError(
                f"offsets {offsets.tolist()[:8]} of bags of {count} ids: they begin with 0, never "
                "decrease, and end within the ids, or with their number if include_last_offset"
            )
        return ends
