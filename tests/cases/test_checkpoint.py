"""Cases of checkpoints and of resuming: 24, 44, 46, 51 and 53, on real files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import eqtrain as et
from eqtrain.checkpoint import Checkpoints, restore
from tests.checkpoint.programs import (
    copies,
    different,
    init,
    make,
    make_loader,
    program,
    run,
)

pytest.importorskip("orbax.checkpoint")
STEPS_PER_EPOCH = 6


@pytest.fixture
def compiled():
    """How many programs XLA compiled since the fixture was made."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


# Case 24: saves in the background and steps that donate


@pytest.mark.parametrize("devices", [None, 8])
def test_a_save_in_the_background_equals_a_blocking_copy(tmp_path, devices):
    step, loader = program(devices, "tree" if devices else None), make_loader()
    ts, _ = run(step, init(step), loader, 5)
    fifth = copies(ts)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(ts, loader, program=step)
        ts, _ = run(step, ts, loader, 3)
        eighth = copies(ts)
    saved = copies(restore(tmp_path, step.init_shapes(make)))
    assert different(saved, fifth) == []
    # Negative control: what the later steps wrote into the same buffers is something else.
    assert "model.first.weight" in different(saved, eighth)


def test_a_first_state_is_saved_and_donated(tmp_path):
    step = program()
    ts = init(step)
    first = copies(ts)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(ts)
        # A warning that something was not donated would be an error here.
        run(step, ts, make_loader(), 1)
    assert different(copies(restore(tmp_path, step.init_shapes(make))), first) == []


def test_a_used_state_is_refused(tmp_path):
    step = program()
    ts = init(step)
    run(step, ts, make_loader(), 1)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(et.UsedStateError, match="call [0-9]+ of `train_step` took"):
            checkpoints.save(ts)
        assert checkpoints.steps() == []


# Case 44, and its kinds: resumed twice, around the end of an epoch, with another prefetch depth


@pytest.fixture(scope="module")
def unbroken() -> tuple[list[Any], dict[str, np.ndarray]]:
    """Twenty steps that nothing interrupts: the losses and ids, and the last arrays."""
    step = program()
    ts, seen = run(step, init(step), make_loader(), 20)
    return seen, copies(ts)


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([STEPS_PER_EPOCH - 1], id="one before the end of an epoch"),
        pytest.param([STEPS_PER_EPOCH], id="at the end of an epoch"),
        pytest.param([STEPS_PER_EPOCH + 1], id="one after the end of an epoch"),
        pytest.param([6, 8], id="twice"),
        pytest.param([3, 4, 5, 13], id="four times"),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(tmp_path, unbroken, stops, compiled):
    step, seen, end = program(), [], {}
    for number, (start, stop) in enumerate(zip([0, *stops], [*stops, 20], strict=True)):
        # All anew but the program, as in a process that is started again.
        loader = make_loader()
        with Checkpoints(tmp_path) as checkpoints:
            ts = checkpoints.restore_or_init(step, make, key=jax.random.key(7), loader=loader)
            assert int(ts.step) == start
            compiled.clear()
            depth = 1 + number  # another each time
            with et.data.prefetch(loader, step.batch_sharding, depth=depth) as batches:
                ts, part = run(step, ts, batches, stop - start)
                checkpoints.save(ts, loader, program=step)
            assert compiled == []
        seen, end = seen + part, copies(ts)
    assert step.compilations == 1
    assert seen == unbroken[0]
    assert different(end, unbroken[1]) == []


def test_a_run_that_forgets_its_position_is_told_apart(tmp_path, unbroken):
    step, loader = program(), make_loader()
    ts, seen = run(step, init(step), loader, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(ts, loader)
    ts, part = run(step, restore(tmp_path, ts), make_loader(), 16)
    assert seen + part != unbroken[0]
    assert different(copies(ts), unbroken[1]) != []


# Case 46


def test_rows_that_were_read_ahead_are_not_lost(tmp_path):
    step, loader = program(), make_loader()
    with et.data.prefetch(loader, depth=4) as batches:
        ts, seen = run(step, init(step), batches, 3)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(ts, loader)
            checkpoints.wait()
            assert checkpoints.metadata(3).position == 3 * 8
    again = make_loader()
    restore(tmp_path, step.init_shapes(make), again)
    expected = make_loader().rows(3)
    np.testing.assert_array_equal(next(iter(again))["id"], expected)


def test_a_loader_that_would_give_other_rows_is_refused(tmp_path):
    step, loader = program(), make_loader()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(init(step), loader)
        with pytest.raises(ValueError, match="must give the same rows. Got seed=5 in place of 4"):
            checkpoints.restore(step.init_shapes(make), make_loader(seed=5))


TEXTS = [{"tokens": np.arange(1 + row % 8)} for row in range(40)]
PAD = {"tokens": 0}


def mixed(weight: float) -> et.data.Mixture:
    sources = {name: {"x": np.zeros(20)} for name in ("a", "b")}
    return et.data.mix(sources, weights={"a": weight, "b": 1.0})


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ((et.data.bucket(TEXTS, (4, 8), pad=PAD), 4), None, "batch_size=2 in place of 4"),
        (
            (et.data.bucket(TEXTS, (4, 8), pad=PAD), 4),
            (et.data.bucket(TEXTS, (2, 4, 8), pad=PAD), 4),
            "the number of buckets=3 in place of 2",
        ),
        (
            (et.data.pack(TEXTS, 16, pad=PAD), 4),
            (et.data.pack(TEXTS, 8, pad=PAD), 4),
            "the length of sequences=8 in place of 16",
        ),
        ((mixed(1.0), 4), (mixed(3.0), 4), "the names and weights of the sources="),
        (({"x": np.zeros(10)}, 4, "drop"), None, "batch_size=2 in place of 4"),
        (
            (et.data.bucket(TEXTS, (4, 8), pad=PAD), 4),
            ({"x": np.zeros(40)}, 4),
            "the number of buckets=None in place of 2",
        ),
        (({"x": np.zeros(40)}, 4), (mixed(1.0), 4), "the size of an epoch=40 in place of None"),
        (({"x": np.zeros(10)}, 4), None, ""),  # the same rows in the same order
    ],
    ids=[
        "batches of buckets",
        "buckets",
        "packs",
        "mixture",
        "dropped rows",
        "no buckets",
        "not mixed before",
        "another batch size",
    ],
)
def test_other_rows_are_refused_whatever_decides_them(tmp_path, saved, now, message):
    def loader(source: Any, batch_size: int, remainder: Any = "pad") -> et.data.Loader:
        return et.data.Loader(source, batch_size, remainder=remainder)

    step = program()
    first, second = loader(*saved), loader(*(now or (saved[0], 2, *saved[2:])))
    next(iter(first))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(init(step), first)
        checkpoints.restore(step.init_shapes(make), loader(*saved))
        if message:
            with pytest.raises(ValueError, match=f"must give the same rows. Got .*{message}"):
                checkpoints.restore(step.init_shapes(make), second)
        else:
            checkpoints.restore(step.init_shapes(make), second)
            assert second.position == first.position == 4
            np.testing.assert_array_equal(second.rows(2), first.rows(1)[:2])


def test_loaders_are_saved_whatever_their_settings_are(tmp_path):
    longest = np.array([len(row["tokens"]) for row in TEXTS]).max()  # of numpy's own type
    schedule = [{"a": 3.0, "b": 1.0}]
    sources = {name: {"x": np.zeros(20)} for name in ("a", "b")}
    by_epoch = et.data.mix(sources, lambda epoch: schedule[epoch])  # which has no second epoch

    class Own:
        """Somebody's own loader, whose `order` is another thing."""

        position = 0
        order = np.arange(5)

    step = program()
    loaders = [
        et.data.Loader(et.data.pack(TEXTS, longest, pad=PAD), 4),
        et.data.Loader(by_epoch, 4, epochs=1),
        Own(),
    ]
    for number, loader in enumerate(loaders):
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(init(step), loader)
            checkpoints.restore(step.init_shapes(make), loader)


def test_a_loader_whose_batches_are_read_by_processes_tells_its_order(tmp_path):
    pytest.importorskip("grain")
    step = program()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(init(step), et.data.Workers(make_loader(), 1))
        with pytest.raises(ValueError, match="Got seed=5 in place of 4"):
            checkpoints.restore(step.init_shapes(make), et.data.Workers(make_loader(seed=5), 1))


# Case 51: onto another mesh


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with step 2 of a run on eight devices."""
    folder = tmp_path_factory.mktemp("eight")
    step, loader = program(8, "tree"), make_loader()
    ts, _ = run(step, init(step), loader, 2)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(ts, loader, program=step)
    return folder, copies(ts)


@pytest.mark.parametrize("devices", [8, 4, 2, 1, None])
def test_what_comes_back_lies_as_the_template_says(eight, devices):
    folder, expected = eight
    step = program(devices, "tree" if devices else None)
    template = step.init_shapes(make)
    ts = restore(folder, template)
    assert different(copies(ts), expected) == []
    fixed = ts.model["fixed"]
    assert (fixed["table"].dtype, fixed["count"].dtype) == (jnp.bfloat16, jnp.int32)
    assert int(fixed["count"]) == 2**30 + 1 and fixed["count"].shape == ()
    assert fixed["rng"].dtype == jax.random.key(0, impl="rbg").dtype
    assert fixed["empty"].shape == (0, 2)
    weight, moment = ts.model["first"]["weight"], ts.opt_state[0].mu["first"]["weight"]
    if devices is None:
        assert isinstance(weight.sharding, SingleDeviceSharding) and not weight.committed
        return
    for leaf, sharding in zip(ts.leaves, ts.structure.shardings, strict=True):
        assert leaf.sharding == sharding
    for array in (weight, moment):
        assert len(array.addressable_shards) == devices
        assert array.addressable_shards[0].data.size == array.size // devices


def test_no_device_holds_more_than_its_shard(eight):
    folder, _ = eight
    template = program(8, "tree").init_shapes(make)
    before = jax.live_arrays()  # held, or a new one may get the id of one that is gone
    known = {id(array) for array in before}
    ts = restore(folder, template)
    new = [array for array in jax.live_arrays() if id(array) not in known]
    held = sum(shard.data.nbytes for a in new for shard in a.addressable_shards)
    expected = sum(
        leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * 8
        for leaf in ts.leaves
    )
    assert held == expected < 8 * sum(leaf.nbytes for leaf in ts.leaves)


def test_a_run_goes_on_with_the_same_bits_on_other_devices(tmp_path, compiled):
    # 8 -> 4 -> 2 -> 1 -> 8 devices, two steps each, against ten steps on eight.
    step = program(8, "tree")
    ts, expected = run(step, init(step), make_loader(), 10)
    end, seen = copies(ts), []
    for devices in (8, 4, 2, 1, 8):
        step, loader = program(devices, "tree"), make_loader()
        with Checkpoints(tmp_path) as checkpoints:
            ts = checkpoints.restore_or_init(step, make, key=jax.random.key(7), loader=loader)
            ts, part = run(step, ts, loader, 2)
            checkpoints.save(ts, loader, program=step)
            checkpoints.wait()
            assert checkpoints.metadata(int(ts.step)).mesh == {"data": devices}
        seen += part
        assert step.compilations == 1
    assert [ids for _, ids in seen] == [ids for _, ids in expected]
    assert seen == expected
    assert different(copies(ts), end) == []


def unfit() -> dict[str, tuple[Any, str]]:
    def changed(**fixed: Any) -> Any:
        return lambda key: (model := make(key)) | {"fixed": model["fixed"] | fixed}

    def without(key: Any) -> Any:
        model = make(key)
        del model["fixed"]["count"]
        return model

    return {
        "a dtype": (
            changed(table=jnp.zeros((8, 3))),
            "`model.fixed.table` is bfloat16[8,3] in the checkpoint and float32[8,3] in the",
        ),
        "a shape": (
            changed(count=jnp.zeros((1,), jnp.int32)),
            "`model.fixed.count` is int32[] in the checkpoint and int32[1] in the template",
        ),
        "a kind of key": (
            changed(rng=jax.random.key(0, impl="unsafe_rbg")),
            "`model.fixed.rng` is a key of kind rbg in the checkpoint, unsafe_rbg in the template",
        ),
        "a new leaf": (
            lambda key: make(key) | {"third_weight": jnp.zeros(2)},
            "`model.third_weight` is not in the checkpoint; `opt_state.0.mu.third_weight` is not",
        ),
        "a missing leaf": (without, "`model.fixed.count` is in the checkpoint only"),
    }


@pytest.mark.parametrize("what", unfit())
def test_a_template_that_does_not_fit_is_refused_by_its_paths(eight, tmp_path, what):
    folder, _ = eight
    other, message = unfit()[what]
    # Without the arrays, so that nothing can be said after looking at them.
    shutil.copytree(folder / "2", tmp_path / "2")
    shutil.rmtree(tmp_path / "2" / "state")
    with pytest.raises(ValueError) as error:
        restore(tmp_path, program().init_shapes(other))
    assert message in str(error.value)
    with pytest.raises(et.checkpoint.CheckpointError, match="state/.*, which is missing"):
        restore(tmp_path, program().init_shapes(make))


# Case 53: which are kept


def at(ts: et.TrainState, step: int) -> et.TrainState:
    return ts.replace(step=jnp.array(step, jnp.int32))


@pytest.fixture(scope="module")
def first() -> et.TrainState:
    return init(program())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep_last": 5}, [7, 8, 9, 10, 11]),
        ({"keep_last": 5, "keep_best": 1}, [3, 7, 8, 9, 10, 11]),
        ({"keep_last": 1, "keep_every": 4}, [4, 8, 11]),
    ],
)
def test_the_last_the_best_and_some_for_ever_are_kept(tmp_path, first, settings, expected):
    for half in (range(1, 7), range(7, 12)):
        # Opened again halfway: what was best is read from the files.
        with Checkpoints(tmp_path, **settings) as checkpoints:
            for step in half:
                checkpoints.save(at(first, step), metrics={"loss": abs(step - 3.0)})
    assert checkpoints.steps() == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == sorted(
        map(str, expected)
    )


def test_the_latest_goes_by_number(tmp_path, first):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (9000, 10000):
            checkpoints.save(at(first, step))
        checkpoints.wait()
        assert checkpoints.latest() == 10000
        assert int(checkpoints.restore(first).step) == 10000
        assert int(checkpoints.restore(first, step=9000).step) == 9000


def test_a_metric_that_is_not_there_is_named(tmp_path, first):
    with Checkpoints(tmp_path, keep_best=1, best_metric="accuracy") as checkpoints:
        with pytest.raises(ValueError, match=r"Got metrics \['loss'\], and best_metric='accuracy'"):
            checkpoints.save(first, metrics={"loss": 1.0})
        checkpoints.save(first)  # without any is allowed: a signal may come before the first


# Going back, and what is there already


def test_a_step_that_is_there_is_not_written_again(tmp_path, first):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(first, 4))
        checkpoints.save(at(first, 4))
        checkpoints.wait()
        assert checkpoints.steps() == [4]


def test_a_run_that_forgot_to_restore_is_refused(tmp_path, first):
    for step in (4, 5):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(at(first, step))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 5):
            with pytest.raises(ValueError, match=f"Got step {step}, and .* holds step 5"):
                checkpoints.save(at(first, step))
        checkpoints.discard_after(4)
        checkpoints.save(at(checkpoints.restore(first), 5))
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5]


def test_where_there_is_none_that_is_said(tmp_path, first):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(FileNotFoundError, match="which holds none"):
            checkpoints.restore(first)
        checkpoints.save(at(first, 4))
        checkpoints.wait()
        with pytest.raises(FileNotFoundError, match="Got step 3 of .*, which holds 4"):
            checkpoints.restore(first, step=3)
