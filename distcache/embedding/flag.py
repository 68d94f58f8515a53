"""The empty parameter of a collection: it freezes tables, and warns of loops that miss them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PENALTIES = ("__mul__", "__pow__", "abs", "linalg_vector_norm", "mul", "norm", "pow", "square")
"""Functions that a penalty on weights begins with."""

_NO_WRITES = frozenset(("requires_grad_", "detach_", "share_memory_"))
"""In-place functions that write no values."""

_warned: list[bool] = []
"""Not empty once the warning was given, which is once in a process."""


class FlagTensor(Tensor):
    """A tensor without elements that stands for tables among a model's parameters.

    Tables cannot be parameters, because DistributedDataParallel would broadcast them. A loop over
    `parameters()` that initialises weights, or adds up a penalty, finds this tensor and would leave
    the tables out silently, so these operations warn once. `data` is a FlagTensor too.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` on plain tensors, after the warning if it writes or begins a penalty."""
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.startswith("_") and name not in _NO_WRITES
        # Averages of models copy each parameter to that of their copy, which has its own tables.
        copies = name == "copy_" and isinstance(args[1], FlagTensor)
        if (writes or name in _PENALTIES) and not copies and not _warned:
            _warned.append(True)
            warnings.warn(
                f"{name}() on the empty parameter of a cached collection does not reach its "
                "tables: initialise them by init_fn in the config or load_table(name, tensor), and "
                "penalise them by weight_decay of the row optimizer",
                stacklevel=3,
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if name == "detach" or func == Tensor.data.__get__:
            return result.as_subclass(FlagTensor)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a new empty parameter with the same `requires_grad`."""
        memo[id(self)] = make_flag(self.device).requires_grad_(self.requires_grad)
        return memo[id(self)]


def make_flag(device: torch.device | str) -> nn.Parameter:
    """Return the empty parameter of a collection. It has two dimensions because some optimizers
    ask for the width of what they update."""
    flag = torch.empty(0, 1, device=device)
    if type(flag) is Tensor:  # a mode that makes tensors of its own class keeps it
        flag = flag.as_subclass(FlagTensor)
    return nn.Parameter(flag)
