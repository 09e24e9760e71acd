"""The step of a replay bundle, taken again on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._core.level import Level
from .._core.levels import Loss, as_loss, innermost_loss, pipe
from .._transforms.shard import shard
from .._transforms.update import update
from ..explain.explanation import Explanation
from ..explain.step import explain_step, make_replay
from .bundle import Bundle
from .files import BundleError


def explain_bundle(bundle: Bundle, loss: Any, make: Callable[[Array], Any]) -> Explanation:
    """Takes the step of a bundle again on one device, and names what goes wrong first.

    **Arguments:**

    - `loss`: the loss, or any chain of transforms around it. Of a chain, what `precision` and
      `remat` made of the loss is used; microbatches and the optimizer are not, and of a mesh only
      the names of its axes, each of one device.
    - `make`: as for `init`: `make(key)` gives the model, or `(model, state)`.

    **Raises:** `BundleError` if the model does not match the bundle, or the bundle holds the
    batches of several steps.
    """
    if bundle.num_steps is not None:
        raise BundleError(
            "One step is explained at a time. "
            f"Got {bundle.path}, whose batch is that of {bundle.num_steps} steps. "
            "Save the step that failed: its batch, and the TrainState from before it."
        )
    # The rate is 0: what the optimizer made of the gradients is not in question.
    step = pipe(innermost(loss), *_alone(bundle.mesh), update(optax.sgd(0.0)))
    template = step.init_shapes(make, key=jax.random.key(0, impl=bundle.key_impl))
    ts = bundle.state_for(template, fields=("model", "state", "key", "step"))
    replay = make_replay(step, ts.structure)
    return explain_step(step, replay, ts, bundle.batch, bundle.step)


def _alone(mesh: dict[str, int] | None) -> tuple[Any, ...]:
    """A mesh of one device, for a loss that names the axes of one."""
    if mesh is None:
        return ()
    axes = tuple(mesh)
    device = np.array(jax.devices()[:1]).reshape((1,) * len(axes))
    return (shard(Mesh(device, axes, axis_types=(AxisType.Auto,) * len(axes)), batch=P(axes)),)


class _Unscaled(Loss):
    """A loss without its loss scale."""

    @property
    def source(self) -> None:
        return None

    @property
    def loss_scaling(self) -> None:
        return None


def innermost(given: Any) -> Loss:
    """The loss of a chain, with what was made of it as a loss, but not its loss scale."""
    loss = innermost_loss(given) if isinstance(given, Level) else as_loss(given, "eqtrain explain")
    return _Unscaled(loss)
