"""A collection's tables as torch's functions have them: initial weights from torch's generator in
TorchRec's order, and parameters over the rows in host memory that notice what is done to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distcache.comm.rendezvous import meet
from distcache.comm.world import current_world, require_group
from distcache.embedding import step
from distcache.embedding.ids import PlainTable
from distcache.embedding.optimizer import in_backward, row_update
from distcache.embedding.settings import NoUpdate, Recipe
from distcache.embedding.step import CollectionTables
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
    recipe: Recipe, before: Sequence[Tensor] | None = None, again: bool = False
) -> list[Tensor] | None:
    """Each table's initial weights, float32 or halves `[rows, D]` on the CPU, as TorchRec's class
    draws them on the recipe's device; None where they come otherwise.

    TorchRec makes `nn.Embedding`s or `nn.EmbeddingBag`s, which draw from a normal distribution, and
    then lets each config's `init_fn` fill the weights: table by table, or, if bags come out, after
    all are made. `again`: as `reset_parameters`, by the `init_fn`s alone, of the weights `before`.
    """
    how, itemsize = recipe.settings, torch.float32.itemsize
    size = sum(spec.rows * spec.width(itemsize) for spec in recipe.lookups.specs) * itemsize
    by_itself = how.init == "auto" and how.seed is None and size <= DRAWN_BYTES
    if recipe.device.type == "meta" or not (how.init == "torch" or by_itself):
        return None
    found: list[Tensor] = []
    for at, (spec, config) in enumerate(zip(recipe.lookups.specs, recipe.configs, strict=True)):
        dtype, size = spec.dtype or getattr(config, "dtype", torch.float32), (spec.rows, spec.dim)
        own = before[at] if before else torch.empty(size, dtype=dtype, device=recipe.device)
        found.append(own.to(recipe.device))
        if not (again or isinstance(config, PlainTable)):
            nn.init.normal_(found[-1])
        if not recipe.pooled and config.init_fn is not None:
            config.init_fn(found[-1])
    for weight, config in zip(found, recipe.configs, strict=True):
        if recipe.pooled and config.init_fn is not None:
            config.init_fn(weight)
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

    def forward(self, *args: Any) -> Tensor:
        """Raise PlanError: rows are looked up through the collection."""
        raise PlanError(
            "a table of a cached collection is not called: look rows up through the collection, or "
            "read weight[ids] in torch.no_grad()"
        )


# -----------------------------------------------------------------------------
# When the tables of a collection are made: as soon as its ranks, and its device, are known.
#
# A collection that is made before `init_process_group` (in a module's `__init__`, say) does not
# know yet who trains with it; one made on `meta`, or without a device, may hear later where it
# lies. It waits; the first use of any collection that waits makes the tables of all of them, in
# the order in which they were made: that order is the same on every rank, the order in which a
# model uses them need not be.


_waiting: list[weakref.ref[Membership]] = []
"""Those that have no tables yet, in the order in which they were made."""

_FIRST_USE = "a forward, a look-ahead, state_dict, load_state_dict, a table's weight"


class Membership:
    """Who trains the tables of a collection, and `made`, the tables once that is known.

    Where torch.distributed is initialised and a device was given they are made at once, by all
    ranks of the group; otherwise at the first use, by all ranks that there are then, or by this
    process alone. It does not hold the collection, so that one that nobody uses is gone at the
    same time on all ranks. `recipe`: what is known of them, by now.
    """

    def __init__(
        self,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        waits: bool,
    ) -> None:
        """`waits`: for the first use, whatever ranks there are."""
        self.recipe, self._process_group, self._timeout_s = recipe, process_group, timeout_s
        self.made: CollectionTables | None = None
        self.weights: dict[str, Tensor] = {}
        """The tables as parameters, once they were asked for; see `expose`."""
        self._adopted: tuple[type, dict[str, Any]] | None = None
        self.was_copied = False
        """Whether a copy of the collection was made, and said what it is."""
        self._alone, self._closed, self._error = False, False, ""
        self._initial = draw_weights(recipe)
        if not waits and (process_group is not None or dist.is_initialized()):
            self._join()
        else:
            _waiting.append(weakref.ref(self))

    @property
    def tables(self) -> CollectionTables:
        """The tables; makes them, and those of all collections that wait, if need be.

        Called by all ranks. Raises ConfigError where this is one of several ranks that have no
        process group, or where a group of several ranks came after the tables were made for this
        process alone, and where there are no tables, or no device; PlanError once closed.
        """
        name = self.recipe.name
        if self._closed:
            raise PlanError(f"the {name} is closed: make a new one")
        if self.weights:
            self._adopt()
        if self.made is None and not self._error:
            self._require_tables()
            first_use = f"the first use of a cached collection ({_FIRST_USE})"
            require_group(first_use)
            self.meet(first_use, "all ranks use it for the first time together", self._timeout_s)
            if dist.is_initialized():
                gc.collect()  # those that nobody holds any more are gone on all ranks alike
            for own in list(_waiting):
                member = own()
                if member is not None and member._is_without_rows:
                    continue  # it may have some later
                _waiting.remove(own)
                if member is not None and not (member._closed or member.made):
                    member._join()
        elif self.made and self._alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this {name} was used before init_process_group and trains alone, but now there "
                f"are {dist.get_world_size()} ranks, whose tables would drift apart: call "
                f"torch.distributed.init_process_group before its first use ({_FIRST_USE})"
            )
        if self.made is None:
            raise PlanError(f"the tables of this {name} could not be made: {self._error}")
        return self.made

    def meet(self, asked: str, way_out: str, limit_s: float | None = None) -> None:
        """See `CollectionTables.meet`; also while there are no tables."""
        if self.made is not None:
            self.made.meet(asked, way_out, limit_s)
        elif dist.is_initialized():
            ranks = dist.get_process_group_ranks(self._process_group)
            shared = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"distcache/first use/{ranks[0]}", shared)
            place = ranks.index(dist.get_rank()), len(ranks)
            limit_s = min(step.ALONE_S if limit_s is None else limit_s, self._timeout_s)
            meet(store, *place, limit_s, asked, way_out)

    def _require_tables(self) -> None:
        if not self.recipe.lookups.specs:
            raise ConfigError(f"this {self.recipe.name} has no tables (tables=[])")
        if self._is_without_rows:
            raise ConfigError(
                f"this {self.recipe.name} lies on 'meta', without rows: give it a device first, by "
                ".to(device) or to_empty(device=...)"
            )

    @property
    def _is_without_rows(self) -> bool:
        """Whether there are no tables to make: none at all, or none yet, on 'meta'."""
        return self.recipe.device.type == "meta" or not self.recipe.lookups.specs

    def _join(self) -> None:
        """Make the tables; by all ranks of the group."""
        self._alone = not dist.is_initialized()
        try:
            world = current_world(self.recipe.device, self._process_group, self._timeout_s)
            with torch.inference_mode(False):  # the first use may be an evaluation
                self.made = CollectionTables(world, self.recipe, self._initial)
            for table in self.recipe.configs:
                if isinstance(table, PlainTable):
                    table.given = None  # the rows have them
        except Exception as error:
            self._error = str(error) or type(error).__name__
            raise
        finally:
            self._initial = None

    def move(self, device: torch.device) -> None:
        """Let the tables, which are not made, lie there."""
        self.recipe = replace(self.recipe, device=device)
        self.recipe.show()

    def draw(self) -> None:
        """Draw the initial weights of tables that are not made from torch's generator once more,
        as `reset_parameters` does."""
        self._initial = draw_weights(self.recipe, self._initial, again=True)

    def close(self) -> None:
        """Let go of the tables, or of the wish to have any."""
        self._closed = True
        if self.made is not None:
            self.made.close()

    # --- the tables as parameters --------------------------------------------------------------

    def expose(self) -> Mapping[str, Tensor]:
        """The tables as parameters, always the same, on `meta` those without rows; by all ranks."""
        specs, known = self.recipe.lookups.specs, self.weights
        on_meta = self.recipe.device.type == "meta"
        if known and all(weight.is_meta == on_meta for weight in known.values()):
            return known
        if on_meta:
            other = self.recipe.settings.dtype
            sizes = ((spec.rows, spec.dim, spec.dtype or other) for spec in specs)
            made = [torch.empty(*size, dtype=own, device="meta") for *size, own in sizes]
            made = [nn.Parameter(empty) for empty in made]
        else:
            made = self.tables.weights() if specs else []
        self.weights = {spec.name: own for spec, own in zip(specs, made, strict=True)}
        for name, before in known.items():  # what was said of them on meta
            vars(self.weights[name]).update(vars(before))
            self.weights[name].requires_grad_(before.requires_grad)
        return self.weights

    def frozen(self) -> set[str]:
        """The tables whose parameters want no gradient."""
        return {name for name, weight in self.weights.items() if not weight.requires_grad}

    def _adopt(self) -> None:
        """Take the optimizer that `apply_optimizer_in_backward` gave all weights, if it did; by all
        ranks, between two steps. Raises ConfigError where there is one already."""
        has_none = isinstance(self.recipe.update, NoUpdate)
        found = in_backward(self.weights, partly=not has_none)
        if found is None or found == self._adopted:
            return
        if not has_none:
            raise ConfigError(
                f"the weights of this {self.recipe.name} were given {found[0].__name__} in "
                f"backward, but it was made with {self.recipe.update}: leave out one of them"
            )
        update, parameters = row_update(*found), self.recipe.parameters
        self._adopted = found
        self.recipe = replace(self.recipe, updates=[update], in_backward=True)
        parameters.take([update])
        for weight in self.weights.values():
            for optimizer in weight._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.param_groups = parameters.groups  # its rate is the rows'
                vars(optimizer).pop("state", None)  # as large as the table, and of no use
        if self.made is not None:
            self.made.take_update(self.recipe)
