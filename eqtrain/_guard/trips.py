"""What the host reads of a step that tripped its guard, and how it says so.

On the device a step makes an `Alarm`: one small array that is read after every step, and what is
read only if that says that something was wrong. On the host that becomes a `Trip`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._sharding.placement import Layout
from .._state.train_state import Structure
from .._util.host import fetch_whole
from .failures import Failure, coordinates, failures, place_text
from .findings import Findings
from .replicas import holders, outliers

# Why a step tripped: the bits of the first number of an alarm, under how many fail in a row.
CAUSES = ("loss", "gradients", "update", "check", "spike", "replicas")
_ROW = 1 << len(CAUSES)
_REPLICAS = CAUSES.index("replicas")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["code", "numbers", "findings", "checksums"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Alarm:
    """What a step says to the host. Two are equal if they are one object.

    **Fields:**

    - `code`, int32[2]: the causes as bits with the failures in a row above them, and the step. The
      first is 0 while all is well.
    - `numbers`, float32[4]: the loss, the norm of the gradients, and the limits that a spike is
      beyond.
    - `findings`: what the checks were given.
    - `checksums`, uint32[devices, leaves]: of what each device holds, where copies are compared.

    After `repeat` all but the last have a leading dim for the steps.
    """

    code: Any
    numbers: Any
    findings: Findings | None
    checksums: Any = None


def make_alarm(
    causes: dict[str, Any],
    in_a_row: Any,
    step: Any,
    numbers: tuple[Any, ...],
    findings: Findings | None,
) -> Alarm:
    bits = sum(causes[name].astype(jnp.int32) << CAUSES.index(name) for name in causes)
    code = jnp.stack([bits + in_a_row * _ROW, step])
    return Alarm(code, jnp.stack([x.astype(jnp.float32) for x in numbers]), findings)


def raise_flag(code: Int[Array, "*steps 2"], cause: str, on: Any) -> Int[Array, "*steps 2"]:
    """The code with one more cause, in the last of its steps."""
    last = (-1, 0) if code.ndim == 2 else (0,)
    return code.at[last].add(on.astype(jnp.int32) << CAUSES.index(cause))


def read_flag(code: Any) -> np.ndarray:
    """The one place where a step's flags leave the devices; `device_get` takes twice as long."""
    return np.asarray(code).reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class Trip:
    """A step that tripped its guard.

    **Fields:**

    - `step`: of the TrainState that it was given, so also of its keys.
    - `call`: of the program.
    - `causes`: some of "loss", "gradients", "update", "check", "spike", "replicas".
    - `in_a_row`: so many steps failed, this one last.
    - `loss`, `grad_norm`, and their limits, beyond which they are a spike (infinite without).
    - `failures`: the checks that failed.
    - `apart`: the leaves of which copies differ, each with the devices whose copy is the odd one.
    - `bundle`: where the replay bundle lies, if one was saved.
    """

    step: int
    call: int
    causes: tuple[str, ...]
    in_a_row: int
    loss: float
    grad_norm: float
    loss_limit: float
    grad_norm_limit: float
    failures: tuple[Failure, ...] = ()
    apart: tuple[tuple[str, tuple[dict[str, int], ...]], ...] = ()
    bundle: str | None = None

    shown: ClassVar[int] = 8

    def __str__(self) -> str:
        said = {
            "loss": f"the loss was {self.loss:g}",
            "gradients": f"the norm of the gradients was {self.grad_norm:g}",
            "update": "the new parameters were not finite",
            "check": f"{len(self.failures)} checks failed"
            if self.failures[1:]
            else "a check failed",
            "spike": self._spike(),
            "replicas": f"copies differ of {self._apart()}",
        }
        text = "; ".join(said[cause] for cause in self.causes)
        text = f"step {self.step}: {text or 'held back, since an earlier step failed'}"
        lines = [f"  {failure}" for failure in self.failures[: self.shown]]
        if len(self.failures) > self.shown:
            lines.append(f"  and {len(self.failures) - self.shown} more")
        return "\n".join([text, *lines])

    def _apart(self) -> str:
        named = [
            f"`{leaf}` on device {' and '.join(f'({place_text(place)})' for place in places)}"
            for leaf, places in self.apart[:3]
        ]
        more = len(self.apart) - len(named)
        return ", ".join(named) + (f" and {more} other arrays" if more else "")

    def _spike(self) -> str:
        pairs = [
            ("the loss", self.loss, self.loss_limit),
            ("the norm of the gradients", self.grad_norm, self.grad_norm_limit),
        ]
        return " and ".join(
            f"{what} was {value:g}, beyond {limit:g}"
            for what, value, limit in pairs
            if value > limit
        )


def read_trips(
    alarm: Alarm, codes: np.ndarray, call: int, layout: Layout | None, structure: Structure
) -> list[Trip]:
    """The steps of one call that tripped. All processes have to call it."""
    numbers = fetch_whole(alarm.numbers).reshape(-1, 4)
    findings = fetch_whole(alarm.findings)
    several = np.ndim(alarm.code) == 2
    trips = []
    for index in np.flatnonzero(codes[:, 0]):
        code, step = map(int, codes[index])
        of_step = jax.tree.map(lambda x, i=index: x[i], findings) if several else findings
        loss, grad_norm, *limits = map(float, numbers[index])
        trips.append(
            Trip(
                step,
                call,
                tuple(name for place, name in enumerate(CAUSES) if code >> place & 1),
                code // _ROW,
                loss,
                grad_norm,
                *limits,
                failures=failures(of_step, layout),
                apart=_apart(alarm, layout, structure) if code >> _REPLICAS & 1 else (),
            )
        )
    return trips


def _apart(alarm: Alarm, layout: Layout | None, structure: Structure) -> Any:
    assert layout is not None and alarm.checksums is not None
    groups = holders(layout.mesh, [sharding.spec for sharding in structure.shardings])
    return tuple(
        (structure.names[leaf], tuple(coordinates(device, layout) for device in devices))
        for leaf, devices in outliers(fetch_whole(alarm.checksums), groups)
    )
