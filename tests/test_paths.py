"""Leaves are named by dotted paths, and chosen by what stands in those names."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqtrain as et
from eqtrain._util.paths import named_leaves, path_name


class Pair(NamedTuple):
    first: Any
    second: Any


class Block(eqx.Module):
    weight: Any
    norm: Any
    layers: list[Any]


TREE = Block(1.0, {"scale": 2.0}, [Pair(3.0, (4.0,)), None])


def test_names_are_dotted_paths_in_the_order_of_the_leaves():
    names = [name for name, _ in named_leaves(TREE)]
    assert names == ["weight", "norm.scale", "layers.0.first", "layers.0.second.0"]
    assert [leaf for _, leaf in named_leaves(TREE)] == jax.tree.leaves(TREE)
    assert named_leaves(3.0) == [("", 3.0)]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(TREE)]
    assert [path_name(path) for path in paths] == names


@pytest.mark.parametrize(
    ("patterns", "but", "chosen"),
    [
        (["weight"], None, ["weight"]),
        ([r"layers\.0"], None, ["layers.0.first", "layers.0.second.0"]),
        (["weight", "norm"], None, ["weight", "norm.scale"]),
        (["."], "norm", ["weight", "layers.0.first", "layers.0.second.0"]),
        (["."], r"^layers.*\d$", ["weight", "norm.scale", "layers.0.first"]),
        (["first$"], None, ["layers.0.first"]),
        (["ir"], None, ["layers.0.first"]),  # searched for, not matched from the start
    ],
)
def test_matching_chooses_by_name(patterns, but, chosen):
    mask = et.matching(*patterns, but=but)(TREE)
    assert jax.tree.structure(mask) == jax.tree.structure(TREE)
    assert [name for name, value in named_leaves(mask) if value] == chosen
    assert all(type(value) is bool for value in jax.tree.leaves(mask))


def test_matching_sees_arrays_of_a_module_with_functions():
    model = eqx.nn.MLP(2, 2, width_size=2, depth=1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    mask = et.matching("weight$")(params)
    chosen = [name for name, value in named_leaves(mask) if value]
    assert chosen == ["layers.0.weight", "layers.1.weight"]


def test_matching_does_not_choose_by_the_number_of_dims():
    stacked = {"norm": {"scale": jnp.ones((3, 2))}, "linear": {"weight": jnp.ones((2, 2))}}
    mask = et.matching("weight$")(stacked)
    assert mask == {"norm": {"scale": False}, "linear": {"weight": True}}
    assert jax.tree.map(lambda leaf: leaf.ndim > 1, stacked) != mask  # negative control


@pytest.mark.parametrize("patterns", [["bias"], ["weight", "bias"]])
def test_pattern_that_matches_nothing_is_refused(patterns):
    with pytest.raises(ValueError, match="'bias', which matches none of: weight, norm.scale"):
        et.matching(*patterns)(TREE)


def test_exception_that_matches_nothing_is_refused():
    """A misspelt exception would let the norms decay without a word."""
    with pytest.raises(ValueError, match="Got 'nrom', which matches none of: .*norm.scale"):
        et.matching(".", but="nrom")(TREE)
