"""The scale of float16 losses: halved where gradients overflow, doubled after a while of none."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .levels import LossScaling


def first_scale(scaling: LossScaling) -> dict[str, Array]:
    """What `TrainState.extra` begins with."""
    return {
        "scale": jnp.asarray(scaling.initial, jnp.float32),
        "good_steps": jnp.zeros((), jnp.int32),
    }


def next_scale(
    scaling: LossScaling, now: dict[str, Array], finite: Bool[Array, ""]
) -> dict[str, Array]:
    """What a step whose gradients were finite, or not, leaves."""
    good_steps = jnp.where(finite, now["good_steps"] + 1, 0)
    grow = good_steps >= scaling.period
    grown = jnp.where(grow, now["scale"] * scaling.factor, now["scale"])
    shrunk = jnp.maximum(now["scale"] / scaling.factor, 1.0)
    # A scale beyond float32 would never come back.
    grown = jnp.where(jnp.isfinite(grown), grown, now["scale"])
    return {
        "scale": jnp.where(finite, grown, shrunk),
        "good_steps": jnp.where(grow, 0, good_steps),
    }
