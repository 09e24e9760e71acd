"""A replay bundle holds a step: what is read is what was saved, or an error says what is not."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree
from refusals import refused

import eqtrain as et
from eqtrain.bundles.bundle import Bundle, read_bundle, save_bundle
from eqtrain.bundles.files import BundleError


class Model(eqx.Module):
    w: Any
    table: Any
    rate: float

    def __call__(self, x: Any) -> Any:
        return x @ self.w * self.rate + self.table.astype(jnp.float32).sum()


def make(key: Array, width: int = 8, rate: float = 0.5) -> Any:
    w = jax.random.normal(key, (4, width))
    state = {"seen": 0, "scale": jnp.ones(3, jnp.bfloat16) / 3}
    return Model(w, jnp.arange(5, dtype=jnp.int8), rate), state


def loss(model: Any, state: PyTree, batch: PyTree, key: Array) -> Any:
    noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(key)
    error = (model(batch["x"]) + 0.1 * noise - batch["more"][0][:, None]) ** 2
    state = state | {"seen": state["seen"] + jnp.asarray(1, state["seen"].dtype)}
    return et.mean(error), state, {}


def program_of(axes: int | None = None, optimizer: Any = None) -> et.Program:
    shard = []
    if axes is not None:
        fsdp = et.fsdp("data", min_size=16)
        shard = [et.shard(et.mesh(data=axes), batch=P("data"), model=fsdp)]
    optimizer = optimizer or optax.adam(0.1)
    return et.pipe(loss, *shard, et.update(optimizer), et.guard, et.donate)


PROGRAM = program_of(4)
BATCH = {
    "x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4),
    "more": (np.arange(8, dtype=np.float32), [None, 0.5]),
}
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A bundle of the third step of PROGRAM, and the TrainState after it."""
    ts = PROGRAM.init(make, key=KEY)
    for _ in range(2):
        ts, _ = PROGRAM(ts, BATCH)
    folder = tmp_path_factory.mktemp("runs") / "some" / "bundle-2"
    path = save_bundle(
        folder, ts, BATCH, program=PROGRAM, reason={"loss": np.float32("nan"), "why": ("spike", 2)}
    )
    assert path == folder and [p.name for p in folder.parent.iterdir()] == ["bundle-2"]
    before = ts.leaves
    # Saving does not hold on to the buffers: warnings are errors, and one is made of a copy.
    ts, _ = PROGRAM(ts, BATCH)
    assert all(leaf.is_deleted() for leaf in before)
    return path, [np.array(leaf) for leaf in ts.leaves]


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Path:
    """A copy of the bundle, to be changed."""
    return shutil.copytree(saved[0], tmp_path / "bundle")


def changed(path: Path, **values: Any) -> Path:
    index = json.loads((path / "bundle.json").read_text())
    (path / "bundle.json").write_text(json.dumps(index | values))
    return path


def test_a_step_taken_from_a_bundle_is_the_step_bit_for_bit(saved: Any):
    path, after = saved
    bundle = read_bundle(path)
    template = PROGRAM.init_shapes(make)
    ts = bundle.state_for(template)
    assert [leaf.sharding for leaf in ts.leaves] == [aval.sharding for aval in template.leaves]
    assert {leaf.sharding.spec for leaf in ts.leaves} == {P(), P(None, "data")}
    assert bundle.step == int(ts.step) == 2
    ts, _ = PROGRAM(ts, bundle.batch)  # which warns if a leaf cannot be donated
    assert [np.array(leaf).tobytes() for leaf in ts.leaves] == [leaf.tobytes() for leaf in after]
    # Negative control: the step does depend on what was restored.
    other, _ = PROGRAM(PROGRAM.init(make, key=KEY), bundle.batch)
    assert not np.array_equal(other.model.w, ts.model.w)


def test_a_bundle_says_what_it_is(saved: Any):
    bundle = read_bundle(saved[0])
    assert bundle.chain == (
        "et.pipe(loss, et.shard(et.mesh(data=4), batch=P('data'), model=et.fsdp('data', "
        "min_size=16)), et.update(optimizer), et.guard, et.donate)"
    )
    assert bundle.mesh == {"data": 4} and bundle.num_steps is None
    assert bundle.step == int(bundle.state["step"])
    assert bundle.reason == {"loss": "nan", "why": ["spike", 2]}
    assert bundle.versions["jax"] == jax.__version__ and bundle.notes == []
    assert bundle.settings == {"model.rate": 0.5}
    assert sorted(p.name for p in bundle.path.iterdir()) == [
        "batch.safetensors",
        "bundle.json",
        "state.safetensors",
    ]


def test_the_files_are_plain(saved: Any):
    """Read by the letter of the formats: JSON, and a header of JSON before the bytes."""
    index = json.loads((saved[0] / "bundle.json").read_text(), parse_constant=pytest.fail)
    raw = (saved[0] / "state.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    bundle = read_bundle(saved[0])
    assert header.keys() == bundle.state.keys() == index["state"].keys()
    first, last = header["state.scale"]["data_offsets"]
    third = np.frombuffer(raw[8 + size + first : 8 + size + last], np.uint16)
    # 1/3 in bfloat16: the upper half of its float32, rounded up.
    assert header["state.scale"]["dtype"] == "BF16" and third.tolist() == [0x3EAB] * 3
    assert index["state"]["model.table"] == "int8[5]" and index["state"]["key"] == "uint32[2]"
    assert index["batch_tree"]["dict"][1] == [
        "more",
        {"tuple": [{"array": "batch.more.0"}, {"list": [None, {"number": 0.5}]}]},
    ]


@pytest.mark.parametrize("axes", [None, 2])
def test_a_bundle_is_restored_on_another_mesh_with_a_note(saved: Any, axes: int | None):
    bundle = read_bundle(saved[0])
    program = program_of(axes)
    template = program.init_shapes(make)
    ts = bundle.state_for(template)
    assert ts.structure is template.structure
    for name, leaf in zip(ts.structure.names, ts.leaves, strict=True):
        assert np.array(leaf).tobytes() == bundle.state[name].tobytes()
    assert {len(leaf.devices()) for leaf in ts.leaves} == {axes or 1}
    where = "on a mesh of data=2" if axes else "without a mesh"
    assert bundle.notes == [f"Saved on a mesh of data=4, restored {where}."]
    if axes is None:
        ts, metrics = program(ts, bundle.batch)
        assert np.allclose(ts.model.w, saved[1][0], atol=1e-6) and np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("axes", [None, 2])
def test_a_restored_state_shares_no_memory_with_the_bundle(saved: Any, axes: int | None):
    bundle = read_bundle(saved[0])
    # Where JAX could take it as it is: on a CPU, at a multiple of 64 bytes.
    raw = np.zeros(128, np.uint8)
    start = -raw.ctypes.data % 64
    scale = raw[start : start + 6].view(jnp.bfloat16)
    bundle.state["state.scale"] = scale
    ts = bundle.state_for(program_of(axes).init_shapes(make))
    scale[:] = 1.0
    assert not np.array(ts.state["scale"]).any()


def test_another_setting_or_version_is_a_note(copied: Path):
    versions = read_bundle(copied).versions | {"jax": "0.0.1", "numpy": "9"}
    bundle = read_bundle(changed(copied, versions=versions))
    now = read_bundle(changed(copied, versions={})).versions
    assert now == {}
    assert bundle.notes == [
        f"Saved with jax 0.0.1; this is jax {jax.__version__}.",
        f"Saved with numpy 9; this is numpy {np.__version__}.",
    ]
    template = PROGRAM.init_shapes(lambda key: make(key, rate=0.25))
    for _ in range(2):
        bundle.state_for(template)
    assert bundle.notes[2:] == ["`model.rate` was 0.5, and is 0.25."]


DTYPES = (
    "bool int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 "
    "float64 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e8m0fnu"
).split()


def test_every_dtype_and_container_comes_back(tmp_path: Path):
    bits = np.random.default_rng(0)
    arrays = {name: bits.integers(0, 2, (2, 3)).astype(jnp.dtype(name)) for name in DTYPES} | {
        "none": np.zeros((0, 3), np.float16),
        "number": np.array(2.5),
        "order": np.ones((3, 2)).T,
    }
    batch = {
        "arrays": arrays,
        "key": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "numbers": (1, 2.5, True, float("-inf"), None, [], {}, ()),
        "indexed": {1: np.ones(2), 0: np.zeros(1)},
        "a": {"b": np.ones(1)},
        "a.b": np.zeros(1),
    }
    program = et.pipe(lambda model, *rest: (model, None, {}), et.update(optax.sgd(1.0)), et.donate)
    ts = program.init(lambda key: jnp.zeros(()), key=KEY)
    back = read_bundle(save_bundle(tmp_path / "b", ts, batch, program=program, reason={})).batch
    assert jax.tree.structure(back) == jax.tree.structure(batch)
    assert list(back) == list(batch) and list(back["indexed"]) == [1, 0]
    assert back["numbers"] == batch["numbers"]
    assert [*map(type, back["numbers"])] == [*map(type, batch["numbers"])]
    for name, array in arrays.items():
        found = back["arrays"][name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == array.tobytes(), name
    assert bool((back["key"] == batch["key"]).all())
    assert (back["a"]["b"], back["a.b"]) == (np.ones(1), np.zeros(1))
    # A batch that is one array.
    ts = program.init(lambda key: jnp.zeros(()), key=KEY)
    back = read_bundle(save_bundle(tmp_path / "c", ts, np.arange(3), program=program, reason={}))
    assert np.array_equal(back.batch, np.arange(3))


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def drop(index: dict[str, Any], name: str) -> Any:
    return {key: value for key, value in index.items() if key != name}


# How a bundle is damaged; the rule, what was got, what to do.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "no folder": (shutil.rmtree, "A bundle is a folder", "bundle, no folder", "Give the path"),
    "no index": (
        lambda path: (path / "bundle.json").unlink(),
        "A bundle is a folder",
        "a folder without `bundle.json`",
        "Give the path",
    ),
    "no state": (
        lambda path: (path / "state.safetensors").unlink(),
        "all of its files",
        "state.safetensors",
        "Copy the bundle again",
    ),
    "truncated": (
        edit("batch.safetensors", lambda raw: raw[:-1]),
        "must be whole",
        "bytes of",
        "Copy the bundle again",
    ),
    "a bit": (
        edit("state.safetensors", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
        "must be what was written",
        "state.safetensors, whose sha256",
        "Copy the bundle again",
    ),
    "no JSON": (
        edit("bundle.json", lambda raw: raw[: len(raw) // 2]),
        "must be JSON",
        "bundle.json: ",
        "Copy the bundle again",
    ),
    "format": (
        lambda path: changed(path, format=2, versions={"eqtrain": "7.1"}),
        "reads bundles of format 1",
        "of format 2, written by eqtrain 7.1",
        "Read it with that version",
    ),
    "no versions": (
        edit("bundle.json", lambda raw: raw.replace(b'"versions"', b'"version"')),
        "must say what",
        "versions",
        "Copy the bundle again",
    ),
    "a leaf more": (
        lambda path: changed(path, state={"model.w": "float32[4,8]"}),
        "must say what",
        "model.table",
        "Copy the bundle again",
    ),
    "another shape": (
        edit("bundle.json", lambda raw: raw.replace(b"float32[4,8]", b"float32[4,9]")),
        "must say what",
        "cannot reshape",
        "Copy the bundle again",
    ),
    "no such array": (
        edit("bundle.json", lambda raw: raw.replace(b'"array": "batch.x"', b'"array": "batch.z"')),
        "must say what",
        "batch.z",
        "Copy the bundle again",
    ),
    "an array less": (
        lambda path: changed(path, batch_tree={"array": "batch.x"}),
        "must say what",
        "batch.more.0",
        "Copy the bundle again",
    ),
    "no tree": (
        lambda path: changed(path, batch_tree={"pickle": "batch.x"}),
        "must say what",
        "pickle",
        "Copy the bundle again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_refused(copied: Path, damage: str):
    change, *parts = DAMAGE[damage]
    read_bundle(copied)
    change(copied)
    with refused(BundleError, *parts):
        read_bundle(copied)


# Another program than the bundle's, and what the error names.
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "shape": (None, lambda key: make(key, width=16), "`model.w` is float32[4,8] in the bundle and"),
    "dtype": (
        None,
        lambda key: (make(key)[0], {"seen": 0, "scale": jnp.ones(3, jnp.float16)}),
        "`state.scale` is bfloat16[3] in the bundle and float16[3] in the program",
    ),
    "missing": (
        None,
        lambda key: (make(key)[0], make(key)[1] | {"new": jnp.zeros(2)}),
        "`state.new` is not in the bundle and float32[2] in the program",
    ),
    "extra": (
        None,
        lambda key: (make(key)[0], {"seen": 0}),
        "`state.scale` is bfloat16[3] in the bundle and not in the program",
    ),
    "chain": (
        optax.sgd(0.1),
        make,
        "`opt_state.0.count` is int32[] in the bundle and not in the program. Use",
    ),
    "many": (
        optax.adam(0.1),
        lambda key: {f"w{i}": jnp.zeros(2) for i in range(3)},
        "and 10 more",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_program_is_refused_by_leaf(saved: Any, other: str):
    optimizer, other_make, named = OTHERS[other]
    bundle = read_bundle(saved[0])
    template = program_of(optimizer=optimizer).init_shapes(other_make)
    with refused(
        BundleError, "must have the leaves", named, "that it was saved with: et.pipe(loss,"
    ):
        bundle.state_for(template)


def started() -> et.TrainState:
    return PROGRAM.init(make, key=KEY)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path):
    ts = started()

    def save(batch: Any, name: str = "b") -> Path:
        return save_bundle(tmp_path / name, ts, batch, program=PROGRAM, reason={})

    with refused(BundleError, "dicts, lists and tuples", "Model at `batch.x.1`", "its part that"):
        save({"x": [1, Model(1, 2, 0.5)]})
    with refused(BundleError, "dicts, lists and tuples", "str at `batch.x`", "its part that"):
        save({"x": "text"})
    assert list(tmp_path.iterdir()) == []
    # A disk that is full: no file may grow beyond so many bytes.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(Exception, match="(?i)file too large"):
            save({"x": np.zeros(50_000)}, "runs/b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.rglob("*")] == ["runs"]
    read_bundle(save(BATCH))
    with refused(BundleError, "not there yet", str(tmp_path), "a name of its own"):
        save(BATCH)
    PROGRAM(ts, BATCH)
    with pytest.raises(et.UsedStateError, match="Got one that call"):
        save(BATCH, "c")


def test_leaves_of_one_name_are_refused(tmp_path: Path):
    program = et.pipe(
        lambda model, *rest: (model["a.b"], None, {}), et.update(optax.sgd(1.0)), et.donate
    )
    ts = program.init(lambda key: {"a": {"b": jnp.zeros(())}, "a.b": jnp.ones(())}, key=KEY)
    with refused(BundleError, "no two may share one", "model.a.b", "Rename a key"):
        save_bundle(tmp_path / "b", ts, {}, program=program, reason={})


WITHOUT = """
    import sys
    sys.modules["safetensors"] = None  # as if it were not installed
    from eqtrain._cli import main
    sys.exit(main(["explain", sys.argv[1], "--loss", "a:b", "--make", "a:b"]))
"""
PROCESS = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import NamedSharding, PartitionSpec as P

    address, index, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=index)
    import eqtrain as et
    from eqtrain.bundles.bundle import save_bundle

    def loss(model, state, batch, key):
        return et.mean((batch["x"] @ model) ** 2), state, {}

    shard = et.shard(et.mesh(data=4), batch=P("data"), model=et.fsdp("data", min_size=1))
    program = et.pipe(loss, shard, et.update(optax.adam(0.1)), et.donate)
    ts = program.init(lambda key: jnp.arange(32.0).reshape(8, 4), key=jax.random.key(0))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    x = jax.make_array_from_callback(x.shape, program.batch_sharding, lambda part: x[part])
    assert not ts.model.is_fully_addressable and not x.is_fully_addressable
    path = save_bundle(folder, ts, {"x": x}, program=program, reason={"process": index})
    assert str(path) == folder
    print("done", flush=True)
"""


def run(script: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(et.__file__).parents[1]
    environment = {
        "PYTHONPATH": str(root),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_save_one_bundle(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    folder = tmp_path / "bundle"
    processes = [run(PROCESS, address, str(index), str(folder)) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and "done" in output, output
    bundle = read_bundle(folder)
    assert bundle.reason == {"process": 0} and bundle.mesh == {"data": 4}
    assert np.array_equal(bundle.state["model"], np.arange(32.0).reshape(8, 4))
    assert np.array_equal(bundle.batch["x"], np.arange(64.0).reshape(8, 8))
    assert isinstance(bundle, Bundle) and [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_the_example_of_the_docstring_runs():
    names = {"et": et, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    [test] = doctest.DocTestFinder().find(
        inspect.unwrap(save_bundle), "save_bundle", module=False, globs=names
    )
    with jax.numpy_dtype_promotion("standard"):
        result = doctest.DocTestRunner(verbose=False).run(test)
    assert result.failed == 0 and result.attempted > 5


def test_without_safetensors_the_extra_is_named(saved: Any):
    process = run(WITHOUT, str(saved[0]))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2, output
    assert output.count("\n") == 1 and 'pip install "eqtrain[safetensors]"' in output
