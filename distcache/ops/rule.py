"""What one optimizer step does to a row, as a formula's name and its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One step of one row optimizer. Letters: w weight, g gradient, and the parts of the state.

    | name | formula | state per row |
    |---|---|---|
    | `sgd` | w -= g rate | none |
    | `adagrad` | sum += g^2; w -= g / (sqrt(sum) + eps) rate | sum `[D]` |
    | `rowwise_adagrad` | sum += mean(g^2); w -= g (1 / (sqrt(sum) + eps) rate) | sum `[1]` |
    | `adam` | m += (g - m) take1; v += (g^2 - v) take2; w -= m / (sqrt(v) + eps) rate | m, v |

    Every operation of a formula is rounded once, in the order in which it stands, so that all
    bodies give the same bits (but for `reference.sqrt` on a CPU). The mean of a row is its sum by
    halves (`reference.row_sums`) divided by D. Numbers are Python floats, rounded to the dtype of
    the rows when they are used.
    """

    name: str
    rate: float
    """The learning rate; for `adam`, with the bias corrections of the step."""
    eps: float = 0.0
    take1: float = 0.0
    """1 - beta1."""
    take2: float = 0.0
    """1 - beta2."""

    def state_width(self, dim: int) -> int:
        """S: floats of state of a row of `dim` elements."""
        return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1, "adam": 2 * dim}[self.name]
