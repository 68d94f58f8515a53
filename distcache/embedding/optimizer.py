"""The optimizer of a collection's rows, as `torch.optim` and TorchRec have it, and clipping with
it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distcache import optim
from distcache.embedding.ids import KeyedOptimizer, RowWiseAdagrad, optimizers
from distcache.embedding.settings import NoUpdate
from distcache.engine.whole import Part
from distcache.errors import ConfigError, PlanError
from distcache.layout import TableSpec

if TYPE_CHECKING:
    from distcache.embedding.collection import CachedCollection
    from distcache.embedding.member import Membership

# -----------------------------------------------------------------------------
# Optimizers as TorchRec is given them: a class and its arguments.

_TWINS: list[tuple[type[optim.RowUpdate], tuple[type, ...]]] = [
    (optim.SGD, (torch.optim.SGD, optimizers.SGD)),
    (optim.Adagrad, (torch.optim.Adagrad, optimizers.Adagrad)),
    (optim.RowWiseAdagrad, (RowWiseAdagrad,)),
    (optim.Adam, (torch.optim.Adam, torch.optim.SparseAdam, optimizers.Adam)),
]
"""Ours, and the classes that it stands for, the first of which says what is not given."""

_OURS = {"lr": "lr", "eps": "eps", "betas": "betas", "weight_decay": "weight_decay"}
_OURS |= {"initial_accumulator_value": "initial_accumulator"}
"""Our names of their settings."""

_HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Settings of theirs that say how a step is computed, not what it is."""


def chosen_update(
    optimizer: Any, kind: Any, given: Any
) -> tuple[optim.RowUpdate | Mapping[str, optim.RowUpdate], bool]:
    """What updates rows (of each table), and whether it does so inside backward: `optimizer`, or
    `kind` with the arguments `given` as TorchRec's fused collections take them."""
    if isinstance(optimizer, type) and kind is None:
        optimizer, kind = None, optimizer
    if kind is not None:
        if optimizer is not None:
            raise ConfigError("give optimizer= or optimizer_type=, not both")
        return row_update(kind, given or {}), True
    if given is not None:
        raise ConfigError("optimizer_kwargs is given without optimizer_type")
    if optimizer is None:
        return NoUpdate(), False
    kinds = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    if not all(isinstance(own, optim.RowUpdate) for own in kinds):
        raise ConfigError(
            f"optimizer={optimizer!r}: give one of distcache.optim.SGD, Adagrad, RowWiseAdagrad, "
            "Adam ... with its settings, such as distcache.optim.Adagrad(lr=0.01), or {table: one} "
            "for each table, or one of torch's or TorchRec's classes with its arguments as "
            "optimizer_kwargs="
        )
    return optimizer, False


def row_update(kind: Any, given: Mapping[str, Any]) -> optim.RowUpdate:
    """The row optimizer that does what `kind(parameters, **given)` of torch or TorchRec asks for.

    `given` may have FBGEMM's names, as TorchRec's fused collections take them. Raises ConfigError
    for another optimizer, and for settings that rows do not have.
    """
    own, theirs = next((pair for pair in _TWINS if kind in pair[1]), (None, ()))
    name = getattr(kind, "__name__", repr(kind))
    if own is None:
        raise ConfigError(
            f"optimizer {name}: rows have those of distcache.optim, and of TorchRec's "
            f"{', '.join(sorted({c.__name__ for _, their in _TWINS for c in their}))}"
        )
    known = inspect.signature(theirs[0]).parameters.values()
    values = {one.name: one.default for one in known if one.default is not one.empty}
    given = dict(given)
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    if "betas" in values:
        first, second = given.get("betas", values["betas"])
        given["betas"] = (given.pop("beta1", first), given.pop("beta2", second))
    for key, value in given.items():
        if key in _HOW:
            continue
        if key not in values or (key not in _OURS and value != values[key]):
            way = f": leave it at {values[key]!r}" if key in values else ": leave it out"
            raise ConfigError(f"optimizer {name}: {key}={value!r} is nothing that rows have{way}")
        values[key] = value
    has = {field.name for field in fields(own)}
    values["lr"] = float(values["lr"])
    return own(**{_OURS[key]: values[key] for key in values if _OURS.get(key) in has})


def in_backward(
    weights: Mapping[str, Tensor], partly: bool = False
) -> tuple[type, dict[str, Any]] | None:
    """The class and arguments that `apply_optimizer_in_backward` was given for all tables, or,
    `partly`, for some; None where not all have one, or none. Raises ConfigError where they
    differ."""
    found: dict[str, tuple[type, dict[str, Any]]] = {}
    for name, weight in weights.items():
        classes = vars(weight).get("_optimizer_classes", [])
        if len(classes) > 1:
            raise ConfigError(
                f"table {name!r} was given {len(classes)} optimizers in backward: give it one"
            )
        if classes:
            found[name] = classes[0], weight._optimizer_kwargs[0]  # type: ignore[attr-defined]
    if not found or (len(found) < len(weights) and not partly):
        return None
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise ConfigError(
                f"table {first!r} was given {found[first]} in backward, and {name!r} "
                f"{found[name]}: the tables of a collection have one optimizer; make a collection "
                "for each"
            )
    return found[first]


# -----------------------------------------------------------------------------
# The optimizer, whose parameters are the rows of a step.


class StateValue:
    """A value of a table's optimizer state, which TorchRec's optimizers save and load by these two
    methods; called by all ranks."""

    def __init__(self, member: Membership, index: int, columns: slice | None) -> None:
        """`columns`: of the state; None: the count of steps."""
        self._member, self._index, self._columns = member, index, columns

    @torch.inference_mode(False)
    def state_dict(self) -> Tensor:
        """As the last step left it; of the state a view of the store."""
        tables = self._member.tables
        tables.read_weights()
        state = tables.whole.local(self._index)[1]
        if self._columns is None or state is None:
            return torch.tensor(tables.counts[self._index])
        return state[:, self._columns]

    def load_state_dict(self, value: Tensor) -> None:
        """Take it back, between two steps. Raises PlanError inside one, ConfigError for a value of
        another shape."""
        tables = self._member.tables
        tables.require_between_steps("loading")
        if self._columns is None:
            tables.counts[self._index] = int(value)
            return
        table, columns = tables.tables[self._index], self._columns
        if value.shape != (table.rows, columns.stop - columns.start):  # which could be spread
            raise ConfigError(
                f"table {table.name!r}: optimizer state of {tuple(value.shape)}, but "
                f"{type(self._member.recipe.update).__name__} keeps "
                f"{(table.rows, columns.stop - columns.start)}: load that of the same optimizer"
            )
        tables.replace([(self._index, columns, value)], is_state=True)


class TableState(Mapping[str, StateValue]):
    """A table's optimizer state by name, `step` among them, as TorchRec's optimizers see it."""

    def __init__(self, member: Membership, index: int) -> None:
        self._member, self._index = member, index

    def _columns(self) -> dict[str, slice]:
        recipe = self._member.recipe
        return recipe.update.state_columns(recipe.lookups.specs[self._index].dim)

    def __iter__(self) -> Iterator[str]:
        return iter(["step", *self._columns()])

    def __len__(self) -> int:
        return 1 + len(self._columns())

    def __getitem__(self, name: str) -> StateValue:
        columns = None if name == "step" else self._columns()[name]
        return StateValue(self._member, self._index, columns)


class RowOptimizer(KeyedOptimizer):
    """Applies the row gradients of a step; its parameters are the step's row leaves.

    One parameter `[U, D]` for each width and data type of table, in the dtype in which rows are
    updated (float32, also of those that are stored in half of it): the distinct rows of the batch,
    whose `.grad` is the gradient to apply, the same on every rank, once the last backward pass of
    the step is over. `param_groups[0]` has the rate, `lr`, and `weight_decay`; where tables have
    their own, there is one group for each, in the order of tables, and the parameters, which are of
    all tables, are those of the first. `step()` changes the cached rows; a step without gradients
    changes nothing and does not count. Where rows are updated inside backward, `step()` does
    nothing.

    To TorchRec's `CombinedOptimizer`, `WarmupOptimizer` and the like it is a `KeyedOptimizer`:
    `params` has the rows of the step, and each table by its name in a `state_dict`.
    """

    def __init__(self, member: Membership) -> None:
        """The optimizer of the tables that `member` has or will have."""
        self._member, parameters = member, member.recipe.parameters
        self.param_groups: list[dict[str, Any]] = []
        torch.optim.Optimizer.__init__(self, parameters.groups, {})
        self.param_groups[0]["params"] = parameters.leaves  # whose members each step changes
        self.defaults["_save_param_groups"] = False
        self.params = parameters.named
        self.state = {
            stands: TableState(member, index)
            for index, stands in enumerate(parameters.tables.values())
        }

    @property
    def in_backward(self) -> bool:
        """Whether rows are updated at the end of a step's backward pass."""
        return self._member.recipe.in_backward

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows of the step whose backward is done; called by all ranks.

        Raises PlanError before the last micro-batch, or without any backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        recipe = self._member.recipe
        if recipe.lookups.specs and not recipe.in_backward:
            self._member.tables.apply()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the row gradients gathered so far; they are always set to None."""
        if self._member.made is not None:
            self._member.made.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the group that the optimizer is made with; raises ConfigError for another."""
        if len(self.param_groups) == len(self._member.recipe.parameters.groups):
            raise ConfigError("a RowOptimizer has the rows of its collection and no other group")
        torch.optim.Optimizer.add_param_group(self, param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: the rows are not the optimizer's to copy."""
        raise PlanError(
            "a RowOptimizer can be neither copied nor pickled: save its state_dict(), and load "
            "that into the one of a new collection"
        )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Whole-table state in original ids, after a flush; called by all ranks.

        `state[table]`: `step` (steps applied) and views of the store named as in torch.optim
        (`sum` `[rows, D]` or `[rows, 1]`; `exp_avg`, `exp_avg_sq`), which change as training goes
        on (copies, on several nodes); `param_groups`: `lr`, `weight_decay` and what schedulers
        keep, `params` the table names.
        """
        state: dict[str, dict[str, Any]] = {}
        tables = self._member.tables if self._specs else None
        update = self._member.recipe.update
        for index, (spec, (_, values)) in enumerate(tables.views(True) if tables else ()):
            state[spec.name] = {"step": torch.tensor(tables.counts[index])}
            for name, columns in update.state_columns(spec.dim).items():
                if values is not None:
                    state[spec.name][name] = values[:, columns]
        names = [[name] for name in state] if len(self.param_groups) > 1 else [list(state)]
        pairs = zip(self.settings(), names, strict=True)
        groups = [group | {"params": own} for group, own in pairs]
        return {"state": state | self._of_others(), "param_groups": groups}

    def settings(self) -> list[dict[str, Any]]:
        """Of each group of parameters all but these."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take what `settings` gave."""
        self._check(groups)
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in found.items() if k != "params"})

    def _check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"{len(groups)} param_groups, but this optimizer has {len(self.param_groups)}: one "
                "for each table where their rates differ, when the collection is made"
            )

    @property
    def _specs(self) -> Sequence[TableSpec]:
        return self._member.recipe.lookups.specs

    def _of_others(self) -> dict[str, Any]:
        """What optimizers around this one keep here, by name: WarmupOptimizer its position."""
        keys = {parameter: key for key, parameter in self.params.items()}
        others = (own for own in self.state.items() if not isinstance(own[1], TableState))
        return {keys[parameter]: state for parameter, state in others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; called by all ranks.

        Raises ConfigError for state of other tables, another optimizer or other shapes, before
        anything changes.
        """
        self._check(state_dict["param_groups"])
        state, names = dict(state_dict["state"]), [table.name for table in self._specs]
        others = {key: state.pop(key) for key in self.params if key in state and key not in names}
        if set(state) != set(names):
            raise ConfigError(f"optimizer state of tables {sorted(state)}, not {sorted(names)}")
        parts: list[Part] = []
        update = self._member.recipe.update
        for index, table in enumerate(self._specs):
            columns, own = update.state_columns(table.dim), state[table.name]
            keeps = {name: (table.rows, at.stop - at.start) for name, at in columns.items()}
            found = {name: tuple(value.shape) for name, value in own.items() if name != "step"}
            if found != keeps or "step" not in own:
                raise ConfigError(
                    f"table {table.name!r}: optimizer state of {found}, but "
                    f"{type(update).__name__} keeps {keeps}, and `step`"
                )
            parts += [(index, at, own[name]) for name, at in columns.items()]
        if names:
            tables = self._member.tables
            tables.replace(parts, is_state=True)
            tables.counts = [int(state[name]["step"]) for name in names]
        self.state.update((self.params[key], value) for key, value in others.items())
        self.take_settings(state_dict["param_groups"])


class RowsAndDense(torch.optim.Optimizer):
    """One optimizer of a whole model: that of its dense part, and those of its cached collections.

    For schedulers, scalers, and loops of others that know one optimizer:
    `distcache.RowsAndDense(torch.optim.Adam(model.parameters()), model)`. `param_groups` are those
    of all, `state` and `defaults` those of the dense part; its methods are called by all ranks.
    """

    def __init__(self, dense: torch.optim.Optimizer, model: nn.Module) -> None:
        """`model`: with the collections, or what is around it. Raises ConfigError without any."""
        found = [vars(module).get("optimizer") for module in model.modules()]
        rows = {id(own): own for own in found if isinstance(own, RowOptimizer)}
        self.dense, self.rows = dense, list(rows.values())  # copies share that of the first
        if not self.rows or not isinstance(dense, torch.optim.Optimizer):
            raise ConfigError(
                f"RowsAndDense({type(dense).__name__}, {type(model).__name__}): give the optimizer "
                "of the dense part, then a model with cached collections"
            )
        self.__setstate__({"defaults": dict(dense.defaults)})  # torch's own attributes

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the dense part, then of the rows, whose parameters are those of the step."""
        return [group for own in (self.dense, *self.rows) for group in own.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the dense part; that of rows is in host memory."""
        return self.dense.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the dense part."""
        self.dense.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update rows and dense parameters, after `closure` where one is given."""
        first, *others = self.rows
        loss = first.step(closure)
        for own in (*others, self.dense):
            own.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; those of rows are always set to None."""
        for own in (self.dense, *self.rows):
            own.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """`dense`, and `rows`: of each collection, whole tables' state, see `RowOptimizer`."""
        return {"dense": self.dense.state_dict(), "rows": [own.state_dict() for own in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. Raises ConfigError for that of other collections."""
        found = state_dict.get("rows", ())
        if len(found) != len(self.rows):
            raise ConfigError(f"state of {len(found)} collections, but there are {len(self.rows)}")
        for own, state in zip(self.rows, found, strict=True):
            own.load_state_dict(state)
        self.dense.load_state_dict(state_dict["dense"])


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    ebc: CachedCollection,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip dense gradients and the step's row gradients by their common norm, which is returned.

    As `torch.nn.utils.clip_grad_norm_` over `parameters` and all tables on the device: each row
    of the global batch counts once, whoever has its gradient, and the norm of the rows is the same
    number in every placement. Call it after the last backward pass (and after
    `GradScaler.unscale_`), on all ranks.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type:g}: give a number above 0, or inf")
    ebc.reduce()
    tables, step = ebc.tables, ebc.tables.current
    if ebc.optimizer.in_backward:
        raise ConfigError(
            "rows were updated inside backward, before their norm was known: give the collection "
            "optimizer=distcache.optim..., and call its step() after clipping"
        )
    dense = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    dense = [parameter for parameter in dense if parameter.grad is not None]
    none = torch.zeros((), dtype=torch.float64, device=tables.world.device)
    norms = [none if step is None else step.view.norm(norm_type)]
    if dense:
        grads = [parameter.grad for parameter in dense]
        norms.append(torch.nn.utils.get_total_norm(grads, norm_type).to(norms[0]))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be "
            "clipped: set error_if_nonfinite=False to scale by it anyway"
        )
    rows = [] if step is None else step.view.params
    torch.nn.utils.clip_grads_with_norm_([*dense, *rows], max_norm, total)
    return total
