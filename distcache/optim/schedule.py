"""The learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from distcache.errors import ConfigError


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, a constant stretch, quadratic decay to 0: the schedule of MLPerf's DLRM.

    `base`: the full rate; `warmup_steps`: the rate of step t (from 0) below it is
    base (t + 1) / warmup_steps; from `decay_start` on, with e = decay_start + decay_steps, it is
    base ((e - t) / decay_steps)^2, and 0 from step e on. `decay_steps=0`: no decay.
    """

    base: float
    warmup_steps: int = 0
    decay_start: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for key in ("warmup_steps", "decay_start", "decay_steps"):
            if getattr(self, key) < 0:
                raise ConfigError(f"optim.{key}={getattr(self, key)} must be at least 0")
        if not 0 <= self.base < float("inf"):
            raise ConfigError(f"a learning rate must be finite and at least 0, got {self.base}")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"optim.decay_start={self.decay_start} lies within the warm-up: "
                f"it must be at least optim.warmup_steps={self.warmup_steps}"
            )

    def __call__(self, step: int) -> float:
        """The rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.base * (step + 1) / self.warmup_steps
        if self.decay_steps == 0 or step < self.decay_start:
            return self.base
        left = self.decay_start + self.decay_steps - step
        return self.base * (max(left, 0) / self.decay_steps) ** 2
