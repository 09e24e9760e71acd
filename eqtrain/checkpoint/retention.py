"""Which checkpoints are kept: a pure function of their steps and metrics."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Retention:
    """The newest, the best, and some for ever; see `Checkpoints` for the fields."""

    keep_last: int | None = 3
    keep_best: int = 0
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and operator.index(self.keep_last) < 1:
            raise ValueError(
                "`keep_last` must be 1 or more, since a run resumes from its last checkpoint; or "
                f"None, which keeps all. Got {self.keep_last}. Use 1 to keep the fewest."
            )
        if operator.index(self.keep_best) < 0:
            raise ValueError(
                "`keep_best` must be 0, which keeps none for its metric, or more. "
                f"Got {self.keep_best}. Use 0."
            )
        if self.keep_every is not None and operator.index(self.keep_every) < 1:
            raise ValueError(
                "`keep_every` must be a number of steps, whose multiples are kept for ever; or "
                f"None. Got {self.keep_every}. Use None to keep none for ever."
            )
        if self.best_mode not in ("min", "max"):
            raise ValueError(
                f'`best_mode` must be "min" or "max". Got {self.best_mode!r}. Use "min" for a loss.'
            )

    def kept(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, of all that there are with their metrics.

        Of two that are equally good the earlier one is better; one without the metric, or whose
        metric is NaN, is never among the best.
        """
        steps = sorted(metrics)
        kept = set(steps if self.keep_last is None else steps[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        sign = 1 if self.best_mode == "min" else -1
        values = {step: metrics[step].get(self.best_metric, math.nan) for step in steps}
        ranked = sorted(
            (step for step in steps if not math.isnan(values[step])),
            key=lambda step: (sign * values[step], step),
        )
        kept.update(ranked[: self.keep_best])
        return kept
