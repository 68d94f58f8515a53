"""A collection's tables as torch's functions have them: initial weights from torch's generator in
TorchRec's order, and parameters over the rows in host memory that notice what is done to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distcache.embedding.ids import PlainTable
from distcache.embedding.settings import CollectionConfig
from distcache.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from distcache.embedding.step import CollectionTables

# -----------------------------------------------------------------------------
# Initial weights, from torch's generator.

DRAWN_BYTES = 256 << 20
"""Up to this size of its tables a collection with `init="auto"` has the initial rows, and leaves
torch's generator, as TorchRec's does; drawing takes about a second there, and grows."""


@torch.no_grad()
def draw_weights(
    config: CollectionConfig, before: Sequence[Tensor] | None = None, again: bool = False
) -> list[Tensor] | None:
    """Each table's initial weights, float32 or halves `[rows, D]` on the CPU, as TorchRec's class
    draws them on the device of `config`; None where they come otherwise.

    TorchRec makes `nn.Embedding`s or `nn.EmbeddingBag`s, which draw from a normal distribution, and
    then lets each config's `init_fn` fill the weights: table by table, or, if bags come out, after
    all are made. `again`: as `reset_parameters`, by the `init_fn`s alone, of the weights `before`.
    """
    how, itemsize = config.settings, torch.float32.itemsize
    size = sum(spec.rows * spec.width(itemsize) for spec in config.lookups.specs) * itemsize
    by_itself = how.init == "auto" and how.seed is None and size <= DRAWN_BYTES
    if config.device.type == "meta" or not (how.init == "torch" or by_itself):
        return None
    found: list[Tensor] = []
    for at, (spec, table_config) in enumerate(
        zip(config.lookups.specs, config.configs, strict=True)
    ):
        dtype, size = (
            spec.dtype or getattr(table_config, "dtype", torch.float32),
            (spec.rows, spec.dim),
        )
        own = before[at] if before else torch.empty(size, dtype=dtype, device=config.device)
        found.append(own.to(config.device))
        if not (again or isinstance(table_config, PlainTable)):
            nn.init.normal_(found[-1])
        if not config.pooled and table_config.init_fn is not None:
            table_config.init_fn(found[-1])
    for weight, table_config in zip(found, config.configs, strict=True):
        if config.pooled and table_config.init_fn is not None:
            table_config.init_fn(weight)
    return [weight.cpu() for weight in found]


# -----------------------------------------------------------------------------
# The parameters. Rows that were changed lie in the cache: whatever reads a weight comes after a
# flush. Whatever writes one comes between two steps, after a flush, and the cache forgets its rows
# and plans ahead: the next step reads what was written.


class TableRows:
    """The rows of table `index` as `TableWeight` and its views have them; `tables()`: whose they
    are, None once these are gone."""

    def __init__(self, tables: CollectionTables, index: int, rows: Tensor) -> None:
        """`rows` `[rows, D]`, a view of the store."""
        self.tables, self.index = weakref.ref(tables), index
        self._plain = rows.data  # with a count of changes of its own
        self._seen = self._plain._version
        self._memory = range(rows.data_ptr(), rows.data_ptr() + rows.nbytes)

    def parameter(self) -> TableWeight:
        """The rows as a parameter."""
        weight = Tensor._make_subclass(TableWeight, self._plain, True)
        weight._at, weight._is_param = self, True
        weight.register_hook(_refuse)
        return weight

    def shares(self, tensor: Any) -> bool:
        """Whether a tensor lies in the memory of these rows."""
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return False
        return tensor.layout == torch.strided and tensor.data_ptr() in self._memory

    def is_written(self) -> bool:
        """Whether the rows were written in a way that nobody has noticed."""
        return self._plain._version != self._seen

    def note(self) -> None:
        """What was written is known."""
        self._seen = self._plain._version


def _refuse(gradient: Tensor) -> None:
    raise PlanError(
        "a gradient reached the weights of a whole table, which nothing applies: rows get theirs "
        "from the collection's output; read weights in torch.no_grad(), or .detach() them"
    )


class TableWeight(Tensor):
    """A table's weights `[rows, D]` in host memory, as a parameter (`isinstance(w, nn.Parameter)`).

    It is read and written by torch's functions at any time between two steps, by all ranks: a
    `copy_`, `fill_` or `init.*_` also of slices, under `torch.no_grad()` or on `.data`, is what the
    next step reads. What rank 0 writes counts. Arrays of it are read-only. A step's gradients do
    not come here: they are of rows.
    """

    _at: TableRows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on rows that are those of the last step, and notice whether it writes."""
        kwargs = kwargs or {}
        if func is Tensor.__iter__:  # whose tensors nobody would see
            return iter(args[0].unbind())
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **kwargs)
            given = (w for w in tree_leaves((args, kwargs)) if isinstance(w, TableWeight))
            rows = list(dict.fromkeys(w._at for w in given))  # in one order on all ranks
            if func == Tensor.data.__set__:
                func, args = Tensor.copy_, (args[0].detach(), args[1])
            for own in rows:
                if (tables := own.tables()) is not None:
                    tables.read_weights()
            with _Writes(rows):
                result = func(*args, **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False
            return tree_map_only(Tensor, lambda found: _kept(found, rows), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own with the same values."""
        return nn.Parameter(self.detach().clone(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain parameter with these values."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def _kept(found: Tensor, rows: Sequence[TableRows]) -> Tensor:
    """A function's result; a view of rows notices too what is done to it."""
    own = next((own for own in rows if own.shares(found)), None)
    if own is not None and not isinstance(found, TableWeight):
        found.__class__ = TableWeight  # and no alias, whose graph others would look into
        found._at = own  # type: ignore[attr-defined]
    return found


class _Writes(TorchDispatchMode):
    """Has the rows ready before an operation writes to them, and says so afterwards.

    A node's ranks share its rows: the first of them writes. The others only draw random numbers,
    so that generators go on alike, and write what else an operation does.
    """

    def __init__(self, rows: Sequence[TableRows]) -> None:
        super().__init__()
        self._rows, self._written = rows, dict[TableRows, bool]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        named = zip(func._schema.arguments, args, strict=False)
        targets = [value for about, value in named if _is_target(about)]
        targets += [kwargs[a.name] for a in func._schema.arguments if _is_target(a, kwargs)]
        targets = [value for value in tree_leaves(targets) if isinstance(value, Tensor)]
        hit = [t for t in targets if any(own.shares(t) for own in self._rows)]
        owners = [own for own in self._rows if any(map(own.shares, hit))]
        if all([self._begin(own) for own in owners]):
            return func(*args, **kwargs)

        def scratch(given: Tensor) -> Tensor:  # laid out alike, for that is how numbers are drawn
            if not any(given is own for own in hit):
                return given
            return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)

        if torch.Tag.nondeterministic_seeded in func.tags or len(hit) < len(targets):
            func(*tree_map_only(Tensor, scratch, args), **tree_map_only(Tensor, scratch, kwargs))
        return hit[0] if func._schema.returns else None

    def _begin(self, own: TableRows) -> bool:
        if own not in self._written:
            tables = own.tables()
            self._written[own] = tables is None or tables.begin_write()
        return self._written[own]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for own in self._written:
            if (tables := own.tables()) is not None:
                tables.end_write(own.index)
            own.note()


def _is_target(argument: Any, given: Iterable[str] | None = None) -> bool:
    """Whether an argument of an operation is written, and is among those given by name."""
    alias = argument.alias_info
    return alias is not None and alias.is_write and (given is None or argument.name in given)


_GETTERS = "shape dtype device ndim requires_grad grad is_leaf grad_fn layout is_cuda is_sparse"
_GETTERS += " is_meta is_quantized is_mkldnn is_cpu is_nested itemsize nbytes _version"
_METHODS = "size dim numel nelement stride is_contiguous is_floating_point is_complex is_shared"
_METHODS += " requires_grad_ element_size storage_offset register_hook get_device __hash__ __len__"
_METHODS += " data_ptr untyped_storage register_post_accumulate_grad_hook"
_ABOUT = {getattr(Tensor, name).__get__ for name in _GETTERS.split()}
_ABOUT |= {Tensor.requires_grad.__set__, Tensor.grad.__set__, Tensor.grad.__delete__}
_ABOUT |= {getattr(Tensor, name) for name in _METHODS.split()}
_ABOUT |= {torch.is_floating_point, torch.is_complex, torch.numel}
_ABOUT |= {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
"""What is asked of a tensor without its values."""


class TableView(nn.Module):
    """A table of a collection under the names that `nn.EmbeddingBag` and `nn.Embedding` have.

    Not among the collection's modules, so that its `weight` is not among the parameters, which DDP
    would broadcast.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self._parameters["weight"] = weight  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `weight = tensor` writes the table, as `load_table` does."""
        if name != "weight":
            super().__setattr__(name, value)
            return
        if tuple(value.shape) != tuple(self.weight.shape):
            raise ConfigError(
                f"weight = a tensor of shape {list(value.shape)}: the table has "
                f"{list(self.weight.shape)}"
            )
        with torch.no_grad():
            self.weight.copy_(value)

    def forward(self, *args: Any) -> Tensor:
        """Raise PlanError: rows are looked up through the collection."""
        raise PlanError(
            "a table of a cached collection is not called: look rows up through the collection, or "
            "read weight[ids] in torch.no_grad()"
        )


class TableViews(nn.ModuleDict):
    """The tables of a collection by name, which may be any text.

    nn.ModuleDict takes no name that is one of its methods ("items") or has a dot in it.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self._modules[name] = TableView(weight)
