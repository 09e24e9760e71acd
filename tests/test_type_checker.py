"""The checker of the tests refuses what beartype refuses, for functions made anew too."""

from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped

from tests.type_checker import check


def _make(annotation: Any):
    @jaxtyped(typechecker=check)
    def keep(x: annotation) -> Float[Array, "n"]:  # pyright: ignore[reportInvalidTypeForm]
        return x

    return keep


def test_a_function_that_is_made_anew_is_checked_each_time():
    for _ in range(2):
        keep = _make(Float[Array, "n"])
        keep(jnp.ones(3, jnp.float32))
        with pytest.raises(TypeCheckError, match="parameters of.*keep"):
            keep(jnp.ones((3, 1), jnp.float32))


def test_functions_of_one_place_and_other_annotations_are_told_apart():
    floats, integers = _make(Float[Array, "n"]), _make(Int[Array, "n"])
    floats(jnp.ones(3, jnp.float32))
    with pytest.raises(TypeCheckError, match="parameters of.*keep"):
        floats(jnp.ones(3, jnp.int32))
    with pytest.raises(TypeCheckError, match="return value of.*keep"):
        integers(jnp.ones(3, jnp.int32))
    with pytest.raises(TypeCheckError, match="parameters of.*keep"):
        integers(jnp.ones(3, jnp.float32))
