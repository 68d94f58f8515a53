"""The optimizer of a collection's rows, as `torch.optim` has it, and clipping with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcache.embedding.core import CachedTables
from distcache.embedding.whole import Part, WholeTables
from distcache.errors import ConfigError, PlanError
from distcache.optim.rows import RowUpdate

if TYPE_CHECKING:
    from distcache.embedding.base import CachedCollection


class RowOptimizer(torch.optim.Optimizer):
    """Applies the row gradients of a step; its parameters are the step's row leaves.

    One parameter `[U, D]` for each width of table: the distinct rows of the step's global batch,
    whose `.grad` is the gradient to apply, the same on every rank, once the last backward pass of
    the step is over. `param_groups[0]["lr"]` is the rate. `step()` changes the cached rows; a
    step without gradients changes nothing and does not count.
    """

    def __init__(self, tables: CachedTables, update: RowUpdate) -> None:
        """`update`: `distcache.optim.SGD`, `Adagrad`, `RowWiseAdagrad` or `Adam` with settings."""
        self._tables, self._update = tables, update
        self._none = [
            torch.zeros(0, group.dim, dtype=tables.settings.dtype, device=tables.world.device)
            for group in tables.groups
        ]
        super().__init__([leaf.requires_grad_() for leaf in self._none], {"lr": update.lr})
        tables.show_leaves = self._show

    def _show(self, leaves: list[Tensor]) -> None:
        self.param_groups[0]["params"][:] = leaves or self._none

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows of the step whose backward is done; called by all ranks.

        Raises PlanError before the last micro-batch, or without any backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tables.require_open()
        self._tables.apply(float(self.param_groups[0]["lr"]))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the row gradients gathered so far; they are always set to None."""
        if self._tables.current is not None:
            self._tables.current.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the group that the optimizer is made with; raises ConfigError for another."""
        if self.param_groups:
            raise ConfigError("a RowOptimizer has the rows of its collection and no other group")
        super().add_param_group(param_group)

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
        on (copies, on several nodes); `param_groups[0]`: `lr` and what schedulers keep, `params`
        the table names.
        """
        tables = self._tables
        state: dict[str, dict[str, Any]] = {}
        for index, (spec, (_, values)) in enumerate(WholeTables(tables).views(states=True)):
            state[spec.name] = {"step": torch.tensor(tables.steps)}
            for name, columns in self._update.state_columns(spec.dim).items():
                if values is not None:
                    state[tables.tables[index].name][name] = values[:, columns]
        group = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        return {"state": state, "param_groups": [{**group, "params": list(state)}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; called by all ranks.

        Raises ConfigError for state of other tables, another optimizer or other shapes, before
        anything changes.
        """
        tables, state = self._tables, state_dict["state"]
        names = [table.name for table in tables.tables]
        if set(state) != set(names):
            raise ConfigError(f"optimizer state of tables {sorted(state)}, not {sorted(names)}")
        steps = {int(state[name]["step"]) for name in names}
        if len(steps) > 1:
            raise ConfigError(f"the tables' step counters differ: {sorted(steps)}")
        parts: list[Part] = []
        for index, table in enumerate(tables.tables):
            columns = self._update.state_columns(table.dim)
            found = {key for key in state[table.name] if key != "step"}
            if found != set(columns):
                raise ConfigError(
                    f"table {table.name!r}: optimizer state {sorted(found)}, but "
                    f"{type(self._update).__name__} keeps {sorted(columns)}"
                )
            for name, at in columns.items():
                want, got = (table.rows, at.stop - at.start), tuple(state[table.name][name].shape)
                if want != got:
                    raise ConfigError(f"{table.name}.{name}: shape {got}, must be {want}")
                parts.append((index, at, state[table.name][name]))
        WholeTables(tables).load_state(parts)
        tables.steps = steps.pop()
        group = {k: v for k, v in state_dict["param_groups"][0].items() if k != "params"}
        self.param_groups[0].update(group)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    ebc: CachedCollection,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip dense gradients and the step's row gradients by their common norm, which is returned.

    As `torch.nn.utils.clip_grad_norm_` over `parameters` and all tables on the device: each row
    of the global batch counts once, on every rank alike. Call it after the last backward pass
    (and after `GradScaler.unscale_`), on all ranks.
    """
    ebc.reduce()
    dense = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    rows = list(ebc.optimizer.param_groups[0]["params"])
    return torch.nn.utils.clip_grad_norm_(
        [*dense, *rows], max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )
