"""Steps that trip leave replay bundles, and the run is that which leaves none, bit for bit."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

bundle = pytest.importorskip("eqtrain.bundles.bundle")
pytest.importorskip("safetensors")


def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
    noise = jax.vmap(jax.random.normal)(key)
    return et.mean(w * jnp.log(batch["x"]) + 0.1 * w**2 * noise), state, {}


def program_of(folder: Path | None, nonfinite: Any = "skip", **options: Any) -> Any:
    shard = et.shard(et.mesh(data=2), batch=P("data"))
    guard = et.guard(nonfinite=nonfinite, bundles=folder, **options)
    return et.pipe(loss, shard, et.update(optax.adam(0.1)), et.ema(0.9), guard, et.donate)


def start(program: Any) -> et.TrainState:
    return program.init(lambda key: jnp.float32(1), key=jax.random.key(0))


def batches(bad: set[int], n: int = 8) -> list[dict[str, np.ndarray]]:
    """Batches of other numbers each, some of them with a row whose logarithm is NaN."""
    x = np.random.default_rng(0).uniform(1, 2, (n, 4)).astype(np.float32)
    x[sorted(bad), 3] = -1
    return [{"x": rows} for rows in x]


def carried(ts: et.TrainState) -> dict[str, bytes]:
    """Every array that both programs have; the guard that waits has one more."""
    named = zip(ts.structure.names, ts.leaves, strict=True)
    return {name: np.array(leaf).tobytes() for name, leaf in named if "waiting" not in name}


@pytest.mark.parametrize("bad", [{2}, {2, 3}, {0, 7}], ids=str)
def test_a_run_that_saves_is_the_run_that_does_not(tmp_path, bad):
    saving, plain = program_of(tmp_path / "bad"), program_of(None)
    ts, expected = start(saving), start(plain)
    states = []
    for batch in batches(bad):
        states.append(carried(expected))
        ts, metrics = saving(ts, batch)
        expected, seen = plain(expected, batch)
        assert float(metrics["skipped"]) == float(seen["skipped"])
        assert (float(metrics["loss"]) == float(seen["loss"])) or np.isnan(float(seen["loss"]))
    saving.check(ts)
    plain.check(expected)
    assert carried(ts) == carried(expected)
    assert [(trip.step, trip.call) for trip in saving.trips] == [(n, n + 1) for n in sorted(bad)]
    # What was saved is the step from before it was taken: its state, its number, and its batch.
    for trip in saving.trips:
        read = bundle.read_bundle(trip.bundle)
        assert read.step == trip.step
        np.testing.assert_array_equal(read.batch["x"], batches(bad)[trip.step]["x"])
        before = states[trip.step]
        for name in ("model", "opt_state.0.mu", "opt_state.0.nu", "extra.ema"):
            assert read.state[name].tobytes() == before[name]
        assert read.state["step"] == trip.step


def test_raise_saves_before_it_raises(tmp_path):
    program = program_of(tmp_path / "bad", "raise")
    ts = start(program)
    first, second, *_ = batches({1})
    ts, _ = program(ts, first)
    before = carried(ts)
    ts, _ = program(ts, second)
    with pytest.raises(et.NonFiniteError) as caught:
        program.check(ts)
    assert caught.value.trip is not None and caught.value.trip.bundle is not None
    read = bundle.read_bundle(caught.value.trip.bundle)
    assert read.state["model"].tobytes() == before["model"] and read.step == 1
    # Training goes on from the state that the error hands over.
    assert caught.value.state is not None
    ts, _ = program(caught.value.state, first)
    program.check(ts)
    assert int(ts.step) == 2


def test_three_are_saved_and_no_more_however_many_trips_follow(tmp_path):
    program = program_of(tmp_path / "bad", max_consecutive=1000)
    ts = start(program)
    (batch,) = batches({0}, 1)
    for _ in range(105):  # more than `trips` remembers
        ts, _ = program(ts, batch)
    program.check(ts)
    assert int(ts.extra["guard"]["skipped"]) == 105
    assert len(list((tmp_path / "bad").iterdir())) == 3


def test_a_run_that_is_resumed_finds_its_folder_taken(tmp_path):
    names = []
    for _ in range(2):
        program = program_of(tmp_path / "bad")
        ts, _ = program(start(program), batches({0}, 1)[0])
        program.check(ts)
        names.append(Path(program.trips[0].bundle).name)
    assert names == ["step-0-call-1", "step-0-call-1-2"]


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not held back leaves no state to save"):
        et.guard(nonfinite="ignore", bundles=tmp_path)
    guard = et.guard(bundles=tmp_path)
    repeated = et.pipe(loss, et.update(optax.sgd(0.1)), guard, et.repeat(2), et.jit)
    ts = start(repeated)
    with pytest.raises(ValueError, match="Leave out `bundles=` of `et.guard`, or `et.repeat`"):
        repeated(ts, {"x": np.ones((2, 4), np.float32)})


def scaled(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * batch["x"]), state, {}


def again(ts: et.TrainState) -> et.TrainState:
    return ts.replace(step=ts.step)


def copied(ts: et.TrainState) -> et.TrainState:
    return jax.tree.map(jnp.copy, ts)


def restored(ts: et.TrainState) -> et.TrainState:
    """As from a checkpoint that was saved without a look at the last step."""
    leaves = tuple(jnp.copy(leaf) for leaf in ts.leaves)
    return et.TrainState(leaves, ts.structure, fresh=True)


@pytest.mark.parametrize("way", [again, copied, restored])
@pytest.mark.parametrize("mesh", [True, False])
def test_a_run_goes_on_from_a_state_that_was_copied_while_it_waited(tmp_path, way, mesh):
    chain = (et.shard(et.mesh(data=2), batch=P("data")),) if mesh else ()
    guard = et.guard(bundles=tmp_path / "bad")
    program = et.pipe(scaled, *chain, et.update(optax.sgd(0.1)), guard, et.donate)
    ts = start(program)
    ts, _ = program(ts, {"x": np.full(4, np.nan, np.float32)})
    ts = way(ts)
    for _ in range(5):
        ts, _ = program(ts, {"x": np.ones(4, np.float32)})
    program.check(ts)
    assert int(ts.step) == 6 and float(ts.model) == pytest.approx(0.5)
    assert int(ts.extra["guard"]["skipped"]) == 1
    # What no longer says what became of its step cannot be asked.
    assert [trip.step for trip in program.trips] == ([0] if way is again else [])
    assert program.compilations == 1


def test_no_bundle_tells_of_a_step_that_was_not(tmp_path):
    program = et.pipe(scaled, et.update(optax.sgd(0.1)), et.guard(bundles=tmp_path), et.donate)
    for fields, kept in (({"model": jnp.float32(555)}, False), ({"step": jnp.int32(7)}, True)):
        ts, _ = program(start(program), {"x": np.full(4, np.nan, np.float32)})
        ts, _ = program(ts.replace(**fields), {"x": np.ones(4, np.float32)})
        program.check(ts)
        assert (program.trips[-1].bundle is not None) is kept
    read = bundle.read_bundle(program.trips[-1].bundle)
    assert read.state["model"] == 1 and read.state["step"] == 0


def test_a_state_on_another_device_is_released_there(tmp_path):
    guard = et.guard(bundles=tmp_path / "bad")
    program = et.pipe(scaled, et.update(optax.sgd(0.1)), guard, et.donate(max_compilations=1))
    ts = jax.device_put(start(program), jax.devices()[1])
    for value in (np.nan, 1, 1):
        ts, _ = program(ts, {"x": np.full(4, value, np.float32)})
    assert int(ts.step) == 3 and ts.model.devices() == {jax.devices()[1]}


def test_a_failure_is_not_passed_over_where_only_the_leaves_were_kept(tmp_path):
    program = program_of(tmp_path / "bad", "raise")
    bad, good, *_ = batches({0})
    ts, _ = program(start(program), bad)
    with pytest.raises(
        et.NonFiniteError, match="a copy, which no longer says what it was"
    ) as caught:
        program(copied(ts), good)
    assert caught.value.state is not None
    ts, _ = program(caught.value.state, good)
    program.check(ts)
    assert int(ts.step) == 1


class Pair(NamedTuple):
    x: Any


def first(model: Any, state: Any, batch: Any, key: Any) -> Any:
    (x,) = jax.tree.leaves(batch)
    return et.mean(model * x), state, {}


@pytest.mark.parametrize("kind", [Pair, lambda x: OrderedDict(x=x), lambda x: {(0, 1): x}])
def test_a_batch_that_no_bundle_can_hold_is_refused_before_anything_is_donated(tmp_path, kind):
    program = et.pipe(first, et.update(optax.sgd(0.1)), et.guard(bundles=tmp_path), et.donate)
    ts = start(program)
    with pytest.raises(bundle.BundleError, match="or leave out `bundles=` of `et.guard`"):
        program(ts, kind(np.ones(4, np.float32)))
    ts, _ = program(ts, {"x": np.ones(4, np.float32)})
    assert float(ts.model) == pytest.approx(0.9) and program.compilations == 1


def test_leaves_of_one_name_are_refused_before_anything_is_donated(tmp_path):
    def tree(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model["a.b"] * model["a"]["b"] * batch["x"]), state, {}

    program = et.pipe(tree, et.update(optax.sgd(0.1)), et.guard(bundles=tmp_path), et.donate)
    ts = program.init(
        lambda key: {"a": {"b": jnp.ones(())}, "a.b": jnp.ones(())}, key=jax.random.key(0)
    )
    with pytest.raises(bundle.BundleError, match="Rename a key of the model"):
        program(ts, {"x": np.ones(4, np.float32)})
    ts.require_unused()


def test_a_run_goes_on_where_a_bundle_cannot_be_written(tmp_path):
    (tmp_path / "bad").write_text("a file where the folder is to be")
    program = et.pipe(scaled, et.update(optax.sgd(0.1)), et.guard(bundles=tmp_path / "bad"), et.jit)
    good = {"x": np.ones(4, np.float32)}
    ts, _ = program(start(program), {"x": np.full(4, np.nan, np.float32)})
    with pytest.warns(UserWarning, match="Got step 0, which was not saved: .*Exists"):
        ts, _ = program(ts, good)
    ts, _ = program(ts, good)
    program.check(ts)
    assert int(ts.step) == 3 and float(ts.model) == pytest.approx(0.8)
    assert [(trip.step, trip.bundle) for trip in program.trips] == [(0, None)]
