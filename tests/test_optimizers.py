"""Any optimizer of optax gives one device's answer on any mesh, and its state lies as its params.

Every alias in `optax` and `optax.contrib` is either here or left out with a reason; one that a
later optax adds fails `test_every_alias_is_trained_or_left_out` until it is classified.

The kit has no code for any one optimizer but where its state lies, which shapes show without a
compilation: that is looked at for every optimizer, in every place. Trained by default are those
that go through something of the kit's: the global norm, statistics of a part of a parameter,
products of whole matrices, the loss as an argument, keys and branches in the state. All are in the
grid.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from eqtrain._util.paths import named_leaves, path_name
from tests.optimizers import LEFT_OUT, OPTIMIZERS

# 128 is where adafactor begins to factor. No two dims of a matrix are equal, so that statistics of
# one dim cannot be taken for those of the other.
VOCABULARY, WIDTH, HIDDEN = 384, 128, 256
# More tokens than any matrix has rows: Newton-Schulz in muon blows up the rounding of a null space.
ROWS, TOKENS, STEPS = 16, 32, 5
# Below the norm of every gradient, so that each step is clipped.
CLIP = 0.1

# Largest difference of a leaf after five steps, relative to the largest number in the leaf: sums of
# float32 in another order, and what the optimizer makes of them.
TOLERANCE = 1e-5
# Every leaf must move so much, else agreement would show nothing.
MOVED = 1e-3


# The task


@functools.cache
def params() -> PyTree:
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float) -> np.ndarray:
        return rng.normal(size=shape, scale=scale).astype(np.float32)

    return {
        "embedding": draw(VOCABULARY, WIDTH, scale=0.3),
        "up": draw(WIDTH, HIDDEN, scale=0.2),
        "down": {"weight": draw(HIDDEN, WIDTH, scale=0.1), "bias": draw(WIDTH, scale=0.1)},
    }


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {
            "tokens": rng.integers(0, VOCABULARY, size=(ROWS, TOKENS), dtype=np.int32),
            "y": rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32),
            # Ragged, so that a mean of the devices' means is not the mean.
            "weight": rng.choice([0.0, 0.5, 1.0, 3.0], size=(ROWS, TOKENS)).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def embed(table: Array, tokens: Array) -> Array:
    """Rows of a table. A device that holds a part of it has zeros for the rest."""
    split = len(table) < VOCABULARY
    start = jax.lax.axis_index("model") * len(table) if split else 0
    found = jax.nn.one_hot(tokens - start, len(table)) @ table
    return jax.lax.psum(found, "model") if split else found


def loss(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
    """A loss for any placement: it joins its shards where its weights are split over `model`."""
    down = model["down"]
    x = embed(model["embedding"], batch["tokens"])
    out = jnp.tanh(x @ model["up"]) @ down["weight"]
    if len(down["weight"]) < HIDDEN:
        out = jax.lax.psum(out, "model")
    error = (out + down["bias"][None, None] - batch["y"]) ** 2
    return et.mean(error.mean(-1), where=batch["weight"]), state, {}


# The names of optax


def is_alias(name: str, value: Any) -> bool:
    """Whether a name of optax makes an optimizer, as far as its signature tells."""
    if name.startswith(("_", "scale_by_")):
        return False
    if not (inspect.isfunction(value) or isinstance(value, functools.partial)):
        return False
    if value.__module__.startswith(("optax._src.alias", "optax.contrib")):
        return True
    signature = inspect.signature(value)
    gives = str(signature.return_annotation)
    return "learning_rate" in signature.parameters or "GradientTransformation" in gives


def test_every_alias_is_trained_or_left_out():
    names = {**vars(optax), **vars(optax.contrib)}
    aliases = {name for name, value in names.items() if is_alias(name, value)}
    left_out = set(" ".join(LEFT_OUT.values()).split())
    assert {"adam", "nadam", "adafactor", "muon", "dog"} <= aliases
    assert not aliases - left_out - set(OPTIMIZERS), "classify these"
    assert not left_out & set(OPTIMIZERS) and left_out <= set(names)


# The meshes, and how the model lies on them

MATRICES = ("embedding", "up", "down.weight")
LEAVES = (*MATRICES, "down.bias")
TENSOR_PARALLEL = {
    "embedding": P("model"),
    "up": P(None, "model"),
    "down.weight": P("model"),
}
MESHES: dict[str, dict[str, int]] = {
    "data8": {"data": 8},
    "data4_model2": {"data": 4, "model": 2},
    "data2_fsdp2_model2": {"data": 2, "fsdp": 2, "model": 2},
}
PLACEMENTS: dict[str, Callable[[str], Any]] = {
    "replicated": lambda axis: et.replicate(),
    "fsdp": lambda axis: et.fsdp(axis, min_size=WIDTH),
    "tensor_parallel": lambda axis: et.fsdp(axis, beside=et.rules(TENSOR_PARALLEL)),
    "tensor_parallel_alone": lambda axis: et.rules(TENSOR_PARALLEL),
}


@dataclasses.dataclass(frozen=True)
class Place:
    mesh: str
    placement: str

    def __str__(self) -> str:
        return f"{self.mesh}-{self.placement}"

    def shard(self) -> Callable[[Any], Any]:
        axes = MESHES[self.mesh]
        axis, batch = ("fsdp", P(("data", "fsdp"))) if "fsdp" in axes else ("data", P("data"))
        mesh = et.mesh(devices=None, **axes)
        return et.shard(mesh, batch=batch, model=PLACEMENTS[self.placement](axis))

    def shards(self) -> dict[str, int]:
        """Into how many parts each leaf is split, by arithmetic."""
        axes = MESHES[self.mesh]
        fsdp = axes.get("fsdp", axes["data"]) if self.placement != "tensor_parallel_alone" else 1
        if self.placement == "replicated":
            return dict.fromkeys(LEAVES, 1)
        if self.placement == "fsdp":
            return dict.fromkeys(LEAVES, fsdp)
        return {**dict.fromkeys(MATRICES, 2 * fsdp), "down.bias": 1}


# All that there are, for those that look across a tensor or that most people use.
EVERYWHERE = ("adafactor", "adamw", "galore", "lamb", "lars", "muon", "sgd", "sm3")
COMPARED = ("replicated", "fsdp", "tensor_parallel")
PLACES = [
    Place(mesh, placement)
    for mesh, placement in itertools.product(MESHES, COMPARED)
    if "model" in MESHES[mesh] or placement != "tensor_parallel"
]
# The others see each mesh once and each placement once; who sees which together takes turns.
ROUNDS = [
    [Place(mesh, placement) for mesh, placement in zip(MESHES, placements, strict=True)]
    for placements in itertools.permutations(COMPARED)
    if placements[0] != "tensor_parallel"
]
PLACES_OF = {
    name: PLACES if name in EVERYWHERE else ROUNDS[index % len(ROUNDS)]
    for index, name in enumerate(OPTIMIZERS)
}
# One for each way through the kit, each in a place where that could go wrong.
DEFAULT = {
    "adafactor": Place("data4_model2", "tensor_parallel"),
    "adamw": Place("data8", "fsdp"),
    "lamb": Place("data2_fsdp2_model2", "fsdp"),
    "MultiSteps": Place("data8", "replicated"),
    "muon": Place("data2_fsdp2_model2", "tensor_parallel"),
    "noisy_sgd": Place("data4_model2", "replicated"),
    "polyak_sgd": Place("data4_model2", "tensor_parallel"),
}
CASES = [pytest.param(name, place, id=f"{name}-{place}") for name, place in DEFAULT.items()] + [
    pytest.param(name, place, id=f"{name}-{place}", marks=pytest.mark.grid)
    for name, places in PLACES_OF.items()
    for place in places
    if DEFAULT.get(name) != place
]


# Training


def program_of(name: str, *chain: Any, **options: Any) -> tuple[et.Program, et.TrainState]:
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZERS[name]())
    program = et.pipe(loss, *chain, et.update(optimizer, **options), et.donate)
    return program, program.init(lambda key: params(), key=jax.random.key(0))


def train(program: et.Program, ts: et.TrainState) -> et.TrainState:
    for batch in batches():
        ts, metrics = program(ts, batch)
        assert float(et.fetch(metrics)["grad_norm"]) > CLIP
    assert program.compilations == 1
    return ts


@functools.cache
def alone(name: str) -> PyTree:
    """The params after training on one device."""
    trained = jax.tree.map(np.array, train(*program_of(name)).model)
    assert min(differences(params(), trained)) > MOVED
    return trained


def differences(actual: PyTree, expected: PyTree) -> list[float]:
    """The largest of each leaf, relative to the largest number in it."""
    return [
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    ]


def require_split(
    ts: et.TrainState, shards: dict[str, int], state_shards: dict[str, int]
) -> list[str]:
    """Checks what a device holds of each param, and of each of the optimizer's leaves like one.

    Returns the names of those leaves.
    """
    for name, leaf in named_leaves(ts.model):
        assert held(leaf) * shards[name] == leaf.size * leaf.dtype.itemsize, name
    shapes = {name: leaf.shape for name, leaf in named_leaves(ts.model)}
    like_params = []
    for name, leaf in named_leaves(ts.opt_state):
        for param, shape in shapes.items():
            if name.endswith(f".{param}") and leaf.shape == shape:
                assert held(leaf) * state_shards[param] == leaf.size * leaf.dtype.itemsize, name
                like_params.append(name)
    return like_params


def held(leaf: Array) -> int:
    """The bytes of a leaf, or of its shape, on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


LOOSER = {
    # Singular vectors whose values are close turn into one another by rounding alone.
    "galore": 3e-4,
    # It divides by products of differences between successive gradients, which are nearly equal.
    "lbfgs": 5e-5,
}
# These keep no moments, or one vector of all params.
WITHOUT_MOMENTS = {"flatten", "fromage", "noisy_sgd", "polyak_sgd", "sign_sgd"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_lies_as_its_params(name: str):
    for place in PLACES_OF[name]:
        optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZERS[name]())
        program = et.pipe(loss, place.shard(), et.update(optimizer), et.donate)
        ts = program.init_shapes(lambda key: params())
        like_params = require_split(ts, place.shards(), place.shards())
        assert bool(like_params) != (name in WITHOUT_MOMENTS)


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_optimizer_gives_the_answer_of_one_device(name: str, place: Place):
    program, ts = program_of(name, place.shard())
    before = require_split(ts, place.shards(), place.shards())
    assert bool(before) != (name in WITHOUT_MOMENTS)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(ts.model)]
    ts = train(program, ts)
    assert require_split(ts, place.shards(), place.shards()) == before
    assert [leaf.sharding for leaf in jax.tree.leaves(ts.model)] == shardings
    assert max(differences(ts.model, alone(name))) < LOOSER.get(name, TOLERANCE)


ZERO = [
    Place("data8", "replicated"),
    Place("data4_model2", "tensor_parallel_alone"),
    Place("data2_fsdp2_model2", "fsdp"),
]


ZERO_DEFAULT = [("adamw", ZERO[0]), ("adafactor", ZERO[1])]
ZERO_CASES = [
    pytest.param(
        name,
        place,
        id=f"{name}-{place}",
        marks=[] if (name, place) in ZERO_DEFAULT else pytest.mark.grid,
    )
    for name, place in itertools.product(["adafactor", "adamw", "lamb", "muon"], ZERO)
]


@pytest.mark.parametrize(("name", "place"), ZERO_CASES)
def test_state_split_over_data_gives_the_answer_of_one_device(name: str, place: Place):
    program, ts = program_of(name, place.shard(), shard_state="data")
    shards, data = place.shards(), MESHES[place.mesh]["data"]
    # What is small stays as its parameter.
    state_shards = {**shards, **{name: shards[name] * data for name in MATRICES}}
    before = require_split(ts, shards, state_shards)
    ts = train(program, ts)
    assert require_split(ts, shards, state_shards) == before
    assert max(differences(ts.model, alone(name))) < TOLERANCE


# Negative control: each device updates its shard as if that were all.


def update_once(name: str, mesh: Mesh | None) -> PyTree:
    """The params after one update by some gradient; with a mesh, device by device."""
    rng = np.random.default_rng(2)
    # Larger in the later rows and columns, so that the shards differ.
    grads = jax.tree.map(
        lambda p: (rng.normal(size=p.shape) * np.indices(p.shape).sum(0) ** 2).astype(p.dtype),
        params(),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZERS[name]())

    def update(params: PyTree, grads: PyTree) -> PyTree:
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    if mesh is not None:
        specs = jax.tree_util.tree_map_with_path(
            lambda path, _: TENSOR_PARALLEL.get(path_name(path), P()), params()
        )
        update = jax.shard_map(
            update, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=False
        )
    return jax.jit(update)(params(), grads)


@pytest.mark.parametrize(
    "name",
    [
        "lamb",
        "muon",
        *(pytest.param(n, marks=pytest.mark.grid) for n in "adafactor galore lars sgd sm3".split()),
    ],
)
def test_an_update_of_each_shard_alone_is_another(name: str):
    by_shard = update_once(name, et.mesh(model=2))
    # Of the size of one update, which lars makes smallest; far above what rounding gives.
    assert max(differences(by_shard, update_once(name, None))) > 10 * TOLERANCE


# Leaves of the optimizer's state that are shaped like a part of a param, or like several


def specs_of(optimizer: Any, make: Callable[[Any], PyTree], model: Any) -> Callable[[str], P]:
    """The spec of a leaf of the optimizer's state, by the end of its path."""
    shard = et.shard(et.mesh(data=4, model=2), batch=P("data"), model=model)
    ts = et.pipe(loss, shard, et.update(optimizer), et.donate).init_shapes(make)
    leaves = named_leaves(ts.opt_state)

    def spec(end: str) -> P:
        [sharding] = [leaf.sharding for name, leaf in leaves if name.endswith(f".{end}")]
        return sharding.spec

    return spec


BOTH = PLACEMENTS["tensor_parallel"]("data")


def test_statistics_of_one_dim_lie_as_that_dim():
    spec = specs_of(OPTIMIZERS["adafactor"](), lambda key: params(), BOTH)
    assert spec("v_row.up") == spec("v_row.embedding") == P("data")
    assert spec("v_col.up") == spec("v_col.embedding") == P("model")
    assert spec("v.up") == spec("v.down.bias") == P()
    spec = specs_of(OPTIMIZERS["sm3"](), lambda key: params(), BOTH)
    assert (spec("mu.up.0"), spec("mu.up.1")) == (P("data"), P("model"))


def test_histories_lie_as_what_they_are_of():
    spec = specs_of(OPTIMIZERS["lbfgs"](), lambda key: params(), BOTH)
    for memory in ("diff_params_memory", "diff_updates_memory"):
        assert spec(f"{memory}.up") == P(None, "data", "model")
        assert spec(f"{memory}.down.bias") == P()
    assert spec("weights_memory") == P()


def test_statistics_that_may_be_of_either_dim_are_replicated():
    arrays = {"stack": jnp.ones((2, 128, 256)), "square": jnp.ones((128, 128))}
    placement = {"stack": P(None, "data", "model"), "square": P("data", "model")}
    spec = specs_of(optax.adafactor(0.01), lambda key: arrays, placement)
    assert spec("v_row.stack") == P(None, "data") and spec("v_col.stack") == P(None, "model")
    assert spec("v_row.square") == spec("v_col.square") == P()
