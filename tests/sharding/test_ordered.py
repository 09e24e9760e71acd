"""With `order="tree"` the number of devices does not change a single bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from models.llama import LLAMA_TINY, Llama
from models.mlp import MLP
from models.resnet import ResNet, Size

ROWS, CLASSES, STEPS = 32, 8, 50
# (devices, microbatches): eight lanes each.
LANES = [(1, 8), (2, 4), (4, 2), (8, 1)]


def batches(shape: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(ROWS, *shape)).astype(np.float32),
            "label": rng.integers(0, CLASSES, ROWS),
            "weight": rng.choice([0.0, 0.3, 1.0], ROWS).astype(np.float32),
        }
        for _ in range(4)
    ]


def measure(logits: Array, batch: PyTree, state: PyTree) -> Any:
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    metrics = {"nll": et.mean(nll), "rows": et.Sum((batch["weight"] > 0).sum())}
    # Two terms with counts of their own, so that the counts are added in order too.
    auxiliary = et.mean((logits**2).mean(-1))
    return et.mean(nll, where=batch["weight"]) + 0.1 * auxiliary, state, metrics


def mlp_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    return measure(model(batch["x"], key=key), batch, state)


def resnet_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    logits, state = model(batch["x"], state, where=batch["weight"])
    return measure(logits, batch, state)


def make_resnet(key: Array, axis_names: tuple[str, ...] | None = ()) -> Any:
    return eqx.nn.make_with_state(ResNet)(
        Size(depths=(1,), widths=(8,), bottleneck=False),
        channels=1,
        num_classes=CLASSES,
        stem="small",
        axis_names=axis_names,
        key=key,
    )


def llama_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    tokens = (batch["x"] * 20).astype(jnp.int32) % LLAMA_TINY.vocab_size
    nll = model.nll(tokens[:, :-1], tokens[:, 1:])
    weight = jnp.broadcast_to(batch["weight"][:, None], nll.shape)
    metrics = {"nll": et.mean(nll), "rows": et.Sum((batch["weight"] > 0).sum())}
    return et.mean(nll, where=weight), state, metrics


TASKS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "llama": (llama_loss, lambda key: Llama(LLAMA_TINY, key=key), (9,)),
    "mlp": (mlp_loss, lambda key: MLP((16, 64, CLASSES), dropout=0.1, key=key), (16,)),
    "resnet": (resnet_loss, make_resnet, (8, 8, 1)),
}


@functools.cache
def run(task: str, devices: int, microbatches: int, placement: str, order: Any = "tree") -> Any:
    """The losses of all steps, and every leaf of the last TrainState."""
    loss, make, shape = TASKS[task]
    model = et.fsdp("data", min_size=64) if placement == "fsdp" else et.replicate()
    program = et.pipe(
        loss,
        et.accumulate(microbatches, order=order),
        et.shard(et.mesh(data=devices), batch=P("data"), model=model, order=order),
        et.update(optax.adamw(1e-2)),
        et.donate,
    )
    ts = program.init(make, key=jax.random.key(0))
    data, losses = batches(shape), []
    for step in range(STEPS):
        ts, metrics = program(ts, data[step % len(data)])
        losses.append(et.fetch({name: metrics[name] for name in ("loss", "nll", "rows")}))
    leaves = {
        name: np.array(leaf) for name, leaf in zip(ts.structure.names, ts.leaves, strict=True)
    }
    assert program.compilations == 1
    return losses, leaves


def differing(a: Any, b: Any) -> list[str]:
    names = [name for name in a[1] if not np.array_equal(a[1][name], b[1][name])]
    return names + [f"metrics of step {i}" for i in range(STEPS) if a[0][i] != b[0][i]]


# By default every number of devices, both placements and all tasks, and not each with each. On one
# device nothing is split, so that both placements are one program there.
DEFAULT = [
    ("mlp", 2, 4, "fsdp"),
    ("mlp", 8, 1, "fsdp"),
    ("resnet", 8, 1, "replicate"),
    ("llama", 4, 2, "fsdp"),
]
GRID = [
    case
    for task, lanes, placement in itertools.product(TASKS, LANES, ["replicate", "fsdp"])
    if (case := (task, *lanes, placement)) not in DEFAULT
]


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("task", "devices", "microbatches", "placement"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)],
)
def test_devices_do_not_change_a_bit(task: str, devices: int, microbatches: int, placement: str):
    reference = run(task, 1, 8, "replicate")
    assert differing(run(task, devices, microbatches, placement), reference) == []


def test_the_usual_order_does_change_bits():
    """The control: else the tests above would say nothing of the order."""
    reference, other = (run("mlp", *lanes, "replicate", None) for lanes in ((1, 8), (4, 2)))
    assert differing(reference, other)
    for name, leaf in reference[1].items():
        np.testing.assert_allclose(other[1][name], leaf, rtol=1e-3, atol=1e-5)


def test_the_answer_is_that_of_the_usual_order():
    tree, usual = run("mlp", 4, 2, "fsdp"), run("mlp", 1, 8, "replicate", None)
    for name, leaf in usual[1].items():
        np.testing.assert_allclose(tree[1][name], leaf, rtol=1e-3, atol=1e-5)
    assert [step["rows"] for step in tree[0]] == [step["rows"] for step in usual[0]]


def test_running_statistics_are_the_mean_over_lanes():
    """A closed form: each lane moves the step's statistics by its own batch mean."""
    loss, make, shape = TASKS["resnet"]
    batch = batches(shape)[0] | {"weight": np.ones(ROWS, np.float32)}
    program = et.pipe(
        loss,
        et.accumulate(2, order="tree"),
        et.shard(et.mesh(data=4), batch=P("data"), order="tree"),
        et.update(optax.sgd(0.0)),
        et.jit,
    )
    ts = program.init(make, key=jax.random.key(0))
    later, _ = program(ts, batch)
    out = np.asarray(ts.model.stem.conv(jnp.asarray(batch["x"])), np.float64)
    lanes = out.reshape(8, -1, out.shape[-1])
    mean, variance = later.state.get(later.model.stem.norm.running)
    np.testing.assert_allclose(mean, 0.1 * lanes.mean(1).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * lanes.var(1).mean(0), rtol=1e-4)


def test_norms_are_ordered_where_parameters_are_whole():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    found = []
    for devices, microbatches in ((1, 8), (4, 2)):
        program = et.pipe(
            mlp_loss,
            et.accumulate(microbatches, order="tree"),
            et.shard(et.mesh(data=devices), batch=P("data"), order="tree"),
            et.update(optimizer),
            et.jit,
        )
        ts, norms = program.init(TASKS["mlp"][1], key=jax.random.key(0)), []
        for batch in batches((16,)):
            ts, metrics = program(ts, batch)
            norms.append(et.fetch(metrics)["grad_norm"])
        found.append((norms, [np.array(leaf) for leaf in ts.leaves]))
    for norms, leaves in found[1:]:
        assert norms == found[0][0]
        for a, b in zip(leaves, found[0][1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_axes_that_split_the_batch():
    model = et.fsdp("fsdp", min_size=64)
    program = et.pipe(
        mlp_loss,
        et.accumulate(2, order="tree"),
        et.shard(et.mesh(data=2, fsdp=2), batch=P(("data", "fsdp")), model=model, order="tree"),
        et.update(optax.adamw(1e-2)),
        et.donate,
    )
    ts = program.init(TASKS["mlp"][1], key=jax.random.key(0))
    data = batches((16,))
    for step in range(STEPS):
        ts, _ = program(ts, data[step % len(data)])
    reference = run("mlp", 1, 8, "replicate")[1]
    for name, leaf in zip(ts.structure.names, ts.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), reference[name], err_msg=name)


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data")])
def test_a_dim_that_two_axes_split_keeps_its_order(axes: tuple[str, str]):
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(batch["x"] @ model["w"]), state, {}

    program = et.pipe(
        loss,
        et.shard(
            et.mesh(data=2, fsdp=4),
            batch=P(("data", "fsdp")),
            model=et.rules({"w": P(axes)}),
            order="tree",
        ),
        et.update(optax.sgd(1.0)),
        et.jit,
    )
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    ts = program.init(lambda key: {"w": jnp.zeros(16)}, key=jax.random.key(0))
    ts, _ = program(ts, {"x": x})
    np.testing.assert_array_equal(ts.model["w"], -x.mean(0))


def chain(loss: Any, *transforms: Any) -> et.Program:
    return et.pipe(loss, *transforms, et.update(optax.sgd(0.1)), et.jit)


def shard(order: Any = "tree", **settings: Any) -> Any:
    arguments: dict[str, Any] = {"batch": P("data"), "order": order} | settings
    return et.shard(et.mesh(data=2), **arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: et.accumulate(3, order="tree"), "Got 3 microbatches, which is no power of two"),
        (lambda: et.accumulate(2, order="sorted"), "Got 'sorted'"),
        (lambda: et.shard(et.mesh(data=3), batch=P("data"), order="tree"), "Got 3 devices along"),
        (lambda: chain(mlp_loss, et.accumulate(2), shard()), "must add in the same order"),
        (lambda: chain(mlp_loss, et.accumulate(2, order="tree"), shard(None)), "the same order"),
        (lambda: chain(mlp_loss, shard(), et.accumulate(2, order="tree")), "inside `et.shard`"),
        (lambda: chain(mlp_loss, shard(), et.accumulate(2)), "order='tree'"),
        (
            lambda: et.shard(et.mesh(data=2, seq=2), batch={"x": P("data", "seq")}, order="tree"),
            "whose examples are split too",
        ),
    ],
)
def test_what_cannot_be_ordered_is_refused_when_it_is_built(build: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_synchronised_statistics_are_refused():
    program = chain(resnet_loss, shard())
    ts = program.init(lambda key: make_resnet(key, axis_names=None), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"Got a loss with a `psum.*axis_names=\(\)"):
        program(ts, batches((8, 8, 1))[0])


def test_a_loss_that_communicates_is_refused():
    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        logits = model(batch["x"])
        everyone = lax.all_gather(logits, "data", tiled=True)
        return et.mean(logits[:, 0] * everyone.sum()), state, {}

    program = chain(loss, shard())
    ts = program.init(TASKS["mlp"][1], key=jax.random.key(0))
    batch = {name: leaf for name, leaf in batches((16,))[0].items() if name != "weight"}
    with pytest.raises(ValueError, match="`all_gather` over"):
        program(ts, batch)


def test_lazy_gathers_are_refused():
    program = chain(mlp_loss, shard(model=et.fsdp("data", min_size=1, lazy="layers")))
    ts = program.init(TASKS["mlp"][1], key=jax.random.key(0))
    with pytest.raises(ValueError, match="lazy gather adds over devices first"):
        program(ts, batches((16,))[0])


def test_shard_alone_makes_one_lane_of_each_device():
    program = et.pipe(mlp_loss, shard(), et.update(optax.adamw(1e-2)), et.jit)
    other = et.pipe(mlp_loss, et.accumulate(2, order="tree"), et.update(optax.adamw(1e-2)), et.jit)
    batch = batches((16,))[0]
    found = []
    for one in (program, other):
        ts, _ = one(one.init(TASKS["mlp"][1], key=jax.random.key(0)), batch)
        found.append([np.array(leaf) for leaf in ts.leaves])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_bytes_are_those_of_a_ring():
    """An all_to_all and an all_gather of what an all-reduce moves in its two halves."""
    loss, make, _ = TASKS["mlp"]
    sizes = {}
    for order in ("tree", None):
        program = et.pipe(
            loss,
            et.accumulate(1, order=order),
            shard(order),
            et.update(optax.sgd(0.1)),
            et.jit,
        )
        ts = program.init_shapes(make)
        ledger = program.inspect(ts, batches((16,))[0]).ledger
        sizes[order] = {kind: entry.bytes for (kind, _), entry in ledger.items()}
    moved, padded = sizes[None]["all-reduce"], sizes["tree"]["all-to-all"]
    assert sizes == {
        None: {"all-reduce": moved},
        "tree": {"all-to-all": padded, "all-gather": padded},
    }
    # Padded to a multiple of two devices for each dtype; and XLA leaves out of an all-reduce the
    # few counts that it knows.
    assert moved <= padded <= moved + 32


def test_a_collective_that_nobody_knows_is_refused():
    """By what it names, an axis of the batch, and not by a list of names."""
    newest = Primitive("newest_collective")
    newest.def_abstract_eval(lambda x, *, over: x)

    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        return et.mean(newest.bind(model(batch["x"])[:, 0], over=("data",))), state, {}

    program = chain(loss, shard())
    ts = program.init_shapes(TASKS["mlp"][1])
    batch = {name: leaf for name, leaf in batches((16,))[0].items() if name != "weight"}
    with pytest.raises(ValueError, match=r"`newest_collective` over \('data',\)"):
        program.lower(ts, batch)
