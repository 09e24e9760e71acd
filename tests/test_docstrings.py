"""Every example in a docstring of the public interface runs, and shows what it says."""

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

GLOBALS = {"et": et, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "eqx": eqx, "P": P}


def public(module: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a module exports, by the name that a user writes, and the methods of its classes."""
    for attribute, value in vars(module).items():
        if attribute.startswith("_"):
            continue
        full = f"{name}.{attribute}"
        if inspect.ismodule(value):
            own = ("checkpoint", "data", "interop", "random")
            if value.__name__.removeprefix("eqtrain.") in own:
                yield from public(value, full)
        elif getattr(value, "__module__", "").startswith("eqtrain"):
            yield full, value


def examples_of(name: str, value: Any) -> list[doctest.DocTest]:
    # The import hook wraps functions; what they wrap has the text, and its place in the file.
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(inspect.unwrap(value), name, module=False, globs=dict(GLOBALS))
    return [test for test in found if test.examples]


TESTS = {test.name: test for name, value in public(et, "et") for test in examples_of(name, value)}


@pytest.mark.parametrize("name", TESTS)
def test_example_runs(name):
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = runner.run(TESTS[name], out=report.append, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


FUNCTIONS = [
    name
    for name, value in public(et, "et")
    if inspect.isroutine(value) and name not in ("et.collapse", "et.replicate", "et.fsdp")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_an_example(name):
    assert name in TESTS


def test_example_that_is_wrong_is_found():
    def wrong() -> None:
        """Adds.

        >>> et.fetch(et.mean(jnp.array([1.0, 3.0])))
        3.0
        """

    [test] = examples_of("wrong", wrong)
    result = doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
    assert (result.failed, result.attempted) == (1, 1)
