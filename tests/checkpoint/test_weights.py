"""Weights alone in a safetensors file."""

import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain.checkpoint import export_weights, read_weights

pytest.importorskip("safetensors")


def make_model(dtype=jnp.bfloat16):
    return {
        "linear": {"weight": jnp.arange(24, dtype=dtype).reshape(8, 3), "bias": jnp.ones(3)},
        "count": jnp.array(5, jnp.int32),
        "activation": jax.nn.relu,
        "flags": jnp.array([True, False]),
        "nothing": jnp.zeros((0, 2)),
    }


def test_what_is_exported_comes_back_with_names_and_dtypes(tmp_path):
    path = tmp_path / "weights.safetensors"
    model = make_model()
    export_weights(model, path)
    # Read by hand: the header is JSON, and its length stands before it.
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert header["linear.weight"]["dtype"] == "BF16"
    assert header["linear.weight"]["shape"] == [8, 3]
    begin, end = header["linear.weight"]["data_offsets"]
    words = np.frombuffer(raw[8 + size :][begin:end], np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(words.view(np.float32).reshape(8, 3), np.arange(24).reshape(8, 3))

    template = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, model)
    read = read_weights(template, path)
    assert read["activation"] is jax.nn.relu
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True):
        if eqx.is_array(b):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_a_transposed_array_is_written_in_its_own_order(tmp_path):
    path = tmp_path / "weights.safetensors"
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    export_weights({"x": array}, path)
    read = read_weights({"x": jax.ShapeDtypeStruct((3, 2), jnp.float32)}, path)
    np.testing.assert_array_equal(np.asarray(read["x"]), array)
    # Negative control: safetensors itself writes the memory as it lies.
    import safetensors.numpy

    safetensors.numpy.save_file({"x": array}, path)
    assert not np.array_equal(safetensors.numpy.load_file(path)["x"], array)


def test_a_sharded_model_comes_back_sharded(tmp_path):
    path = tmp_path / "weights.safetensors"
    mesh = et.mesh(data=8)
    split = NamedSharding(mesh, P("data"))
    model = {"weight": jax.device_put(jnp.arange(16, dtype=jnp.bfloat16).reshape(8, 2), split)}
    export_weights(model, path)
    template = {"weight": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=split)}
    read = read_weights(template, path)["weight"]
    assert read.sharding == split
    assert read.addressable_shards[0].data.shape == (1, 2)
    np.testing.assert_array_equal(np.asarray(read), np.asarray(model["weight"]))


def test_a_model_that_does_not_fit_is_refused_by_its_paths(tmp_path):
    path = tmp_path / "weights.safetensors"
    export_weights({"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(1)}, path)
    template = {"a": jnp.zeros(3), "b": jnp.zeros(3, jnp.bfloat16), "d": jnp.zeros(1)}
    with pytest.raises(ValueError) as error:
        read_weights(template, path)
    for part in (
        "`d` is not in the file",
        "`c` is in the file only",
        "`a` is float32[2] in the file and float32[3] in the model",
        "`b` is float32[3] in the file and bfloat16[3] in the model",
    ):
        assert part in str(error.value)


def test_what_no_such_file_can_hold_is_refused_by_its_path(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match=r"Got `rng` of key<fry>"):
        export_weights({"rng": jax.random.key(0)}, path)
    with pytest.raises(ValueError, match=r"Got `small` of float8_e4m3fn"):
        export_weights({"small": jnp.zeros(2, jnp.float8_e4m3fn)}, path)
    assert list(tmp_path.iterdir()) == []


def test_the_extras_are_named_where_they_are_missing():
    script = """
import sys
sys.modules["orbax.checkpoint"] = sys.modules["safetensors"] = None  # as if not installed
import tempfile
import eqtrain as et
for action in (
    lambda: et.checkpoint.Checkpoints(tempfile.mkdtemp()),
    lambda: et.checkpoint.export_weights({}, "x"),
):
    try:
        action()
    except ImportError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert 'pip install "eqtrain[checkpoint]"' in result.stdout
    assert 'pip install "eqtrain[safetensors]"' in result.stdout


def test_weights_are_on_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A rename that overtakes the bytes leaves an empty file after a power cut."""
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.stat(descriptor).st_ino)
        assert not (tmp_path / "weights.safetensors").exists()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    export_weights(make_model(), tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_ino in synced
