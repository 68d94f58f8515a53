"""Copies of a collection: `copy.deepcopy`, of which weight averaging and teachers are made."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distcache.errors import PlanError

if TYPE_CHECKING:
    from distcache.embedding.member import Membership

log = logging.getLogger(__name__)


class Copied(nn.Module):
    """A collection that may be a copy: one that reads the tables of the first, and trains nothing.

    `_copied`: that whose tables these are, where this is a copy.
    """

    _copied: tuple[Any, ...] = ()
    _member: Membership
    trainable: nn.Parameter

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        """A module over the same tables, which reads what they are then, and trains nothing."""
        copied = type(self).__new__(type(self))
        own = vars(self) | {"_views": None, "_copied": ()}
        shared = (own[name] for name in ("_member", "reader", "optimizer", "_frozen"))
        memo.update({id(self): copied} | {id(one): one for one in shared})
        vars(copied).update(copy.deepcopy(own, memo), _copied=self._copied or (self,))
        if not self._member.was_copied:
            self._member.was_copied = True
            log.warning(
                "a copy of a %s has no tables of its own: it reads those of the first, which go on "
                "training. To keep them as they are, use distcache.save, or copy its state_dict()",
                type(self).__name__,
            )
        return copied

    def _refuse_gradients(self, found: Sequence[Tensor]) -> None:
        """Let no gradient come to what a copy in training has given out."""

        def refuse(gradient: Tensor) -> None:
            raise self._reads_alone("be trained")

        if self._copied and self._trains and self.trainable.requires_grad:
            for values in found:
                values.requires_grad_(True).register_hook(refuse)

    def _reads_alone(self, what: str) -> PlanError:
        return PlanError(
            f"a copy (copy.deepcopy) of a {type(self).__name__} cannot {what}: it reads the tables "
            "of the first, which has the steps. Call it after eval() or in torch.no_grad(), or "
            "freeze it by requires_grad_(False); to train other tables make another collection"
        )
