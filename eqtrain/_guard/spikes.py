"""Steps whose loss or gradients stand out, by a limit that follows the run."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The standard deviation of a normal distribution, in median absolute deviations.
_DEVIATION = 1.4826
# The smallest deviation, as a share of the median: a loss that hardly moves has none of its own.
_LEAST = 1e-3


@dataclasses.dataclass(frozen=True)
class Spike:
    """When a step is a spike: its loss or gradient norm is far above those of the steps before.

    Beyond `median + threshold * deviation` of the last `window` finite values, where the deviation
    is 1.4826 times the median absolute deviation, and a thousandth of the median at least. Up to
    half of the window may be outliers without moving that far. No step is a spike before the window
    is full.

    **Arguments:**

    - `threshold`: in deviations.
    - `window`: so many steps.
    - `skip`: whether a spike is skipped as a step is that is not finite.

    **Reference:** Rousseeuw and Croux 1993, https://doi.org/10.1080/01621459.1993.10476408

    ```python
    >>> step = et.guard(spike=et.Spike(threshold=8.0, window=64, skip=True))

    ```
    """

    threshold: float = 8.0
    window: int = 64
    skip: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold < float("inf"):
            raise ValueError(
                "The threshold of a spike must be positive. "
                f"Got {self.threshold}. 8 deviations are hardly ever chance."
            )
        if self.window < 4:
            raise ValueError(
                "The window of a spike must hold some steps to compare with. "
                f"Got {self.window}. 64 is usual, 4 the least."
            )

    def begin(self) -> dict[str, Array]:
        """The window of each of the two, and how many values they were given."""
        return {
            "loss": jnp.zeros(self.window),
            "grad_norm": jnp.zeros(self.window),
            "count": jnp.zeros((), jnp.int32),
        }

    def limits(self, seen: dict[str, Array]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Beyond what the next loss and gradient norm are a spike."""
        full = seen["count"] >= self.window
        loss, norm = (self._limit(seen[name]) for name in ("loss", "grad_norm"))
        return jnp.where(full, loss, jnp.inf), jnp.where(full, norm, jnp.inf)

    def _limit(self, values: Float[Array, " window"]) -> Float[Array, ""]:
        median = _median(values)
        deviation = _DEVIATION * _median(jnp.abs(values - median))
        return median + self.threshold * jnp.maximum(deviation, _LEAST * jnp.abs(median))

    def remember(
        self,
        seen: dict[str, Array],
        loss: Float[Array, ""],
        grad_norm: Float[Array, ""],
        on: Bool[Array, ""],
    ) -> dict[str, Array]:
        """The windows after one more step, if both of its values are finite and `on` is true."""
        on = on & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        place: Int[Array, ""] = seen["count"] % self.window

        def put(values: Array, value: Array) -> Array:
            return values.at[place].set(jnp.where(on, value.astype(values.dtype), values[place]))

        return {
            "loss": put(seen["loss"], loss),
            "grad_norm": put(seen["grad_norm"], grad_norm),
            "count": seen["count"] + on.astype(jnp.int32),
        }


def _median(values: Float[Array, " n"]) -> Float[Array, ""]:
    ordered = jnp.sort(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
