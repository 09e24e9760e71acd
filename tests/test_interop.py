"""Rules that carry weights between frameworks: each form, both ways, and what they refuse."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain.interop import compare, export, load, prefixed, read, rule, write


def tensor(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


LAYERS = {f"layer.{i}.{part}.w": tensor(3, 2, seed=i) for i in range(11) for part in ("q", "k")}
PARTS: Any = {"part": ("q", "k")}
# Of each form: the rule, what it makes of LAYERS, by numpy.
FORMS = {
    "one to one": (
        rule("layer.{i}.{part}.w", "blocks.{i}.{part}", **PARTS),
        {"blocks": [{p: LAYERS[f"layer.{i}.{p}.w"] for p in "qk"} for i in range(11)]},
    ),
    "transposed": (
        rule("layer.{i}.{part}.w", "{part}.{i}", "o i -> i o", **PARTS),
        {p: [LAYERS[f"layer.{i}.{p}.w"].T for i in range(11)] for p in "qk"},
    ),
    "stacked": (
        rule("layer.{i}.{part}.w", "{part}", **PARTS),
        {p: np.stack([LAYERS[f"layer.{i}.{p}.w"] for i in range(11)]) for p in "qk"},
    ),
    "stacked behind": (
        rule("layer.{layer}.{part}.w", "{part}", "layer o i -> i o layer", **PARTS),
        {p: np.stack([LAYERS[f"layer.{i}.{p}.w"].T for i in range(11)], -1) for p in "qk"},
    ),
    "joined": (
        rule("layer.{i}.{part}.w", "qk.{i}", "part o i -> i (part o)", **PARTS),
        {"qk": [np.hstack([LAYERS[f"layer.{i}.{p}.w"].T for p in "qk"]) for i in range(11)]},
    ),
    "stacked and joined": (
        rule("layer.{n}.{part}.w", "all", "n part o i -> n (part o) i", **PARTS),
        {
            "all": np.stack(
                [np.vstack([LAYERS[f"layer.{i}.{p}.w"] for p in "qk"]) for i in range(11)]
            )
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_rules_do_what_numpy_does_and_undo_it(form):
    # Eleven layers: 10 comes after 9 and not after 1.
    one, expected = FORMS[form]
    template = jax.tree.map(lambda array: zeros(*array.shape), expected)
    loaded = load(template, LAYERS, [one])
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for actual, wanted in zip(*map(jax.tree.leaves, (loaded, expected)), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    back = export(loaded, [one])
    assert back.keys() == LAYERS.keys()
    for name, array in LAYERS.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].flags.c_contiguous


def test_one_tensor_is_split_into_leaves_and_joined_again():
    fused = tensor(4, 6)
    split = rule("attn.weight", "{part}", "i (part o) -> part o i", part=("q", "k", "v"))
    loaded = load({name: zeros(2, 4) for name in "qkv"}, {"attn.weight": fused}, [split])
    for index, name in enumerate("qkv"):
        np.testing.assert_array_equal(loaded[name], fused[:, 2 * index : 2 * index + 2].T)
    np.testing.assert_array_equal(export(loaded, [split])["attn.weight"], fused)


def test_sizes_take_a_dim_apart():
    by_heads = tensor(6, 4)  # head by head: a query and a key of 1
    rearrange = rule("w", "w", "(head part o) i -> i (part head o)", head=3, part=2)
    loaded = load({"w": zeros(4, 6)}, {"w": by_heads}, [rearrange])["w"]
    np.testing.assert_array_equal(loaded, by_heads[[0, 2, 4, 1, 3, 5]].T)
    np.testing.assert_array_equal(export({"w": loaded}, [rearrange])["w"], by_heads)


def test_scalars_and_what_is_no_array_pass():
    template = {"scale": jnp.float32(0.0), "name": "tanh", "size": 3, "none": None}
    loaded = load(template, {"s": np.array(2.0, np.float32)}, [rule("s", "scale")])
    assert loaded == {**template, "scale": 2.0} and loaded["scale"].shape == ()
    assert export(loaded, [rule("s", "scale")])["s"].shape == ()


def test_missing_and_unused_raise_unless_they_are_named():
    template = {"a": zeros(2), "b": zeros(2), "head": jnp.ones(2)}
    rules = [rule("x.a", "a"), rule("x.b", "b")]
    tensors = {"x.a": tensor(2), "y.b": tensor(2), "ids": np.arange(3)}
    report = compare(template, tensors, rules)
    assert report.loaded == {"a": ("x.a",)}
    assert report.missing == {"b": "x.b", "head": None}
    assert report.unused == ("y.b", "ids")
    assert str(report).splitlines() == [
        "1 leaves have values.",
        "missing: `b`, from `x.b`",
        "missing: `head`, which no rule makes",
        "unused: `y.b`",
        "unused: `ids`",
    ]
    with pytest.raises(ValueError, match=r"leaves without one: `b`, from `x\.b`, `head`, which no"):
        load(template, tensors, rules)
    with pytest.raises(ValueError, match=r"Got tensors without one: `y\.b`; add rules"):
        load(template, tensors, rules, missing=("b", "head"), unused=("^ids$",))
    loaded = load(template, tensors, rules, missing=("b", "head"), unused=("^ids$", "b$"))
    np.testing.assert_array_equal(loaded["head"], np.ones(2))
    shapes = jax.eval_shape(lambda: template)
    with pytest.raises(ValueError, match=r"Got `b` as a shape, float32\[2\]\. Pass a template"):
        load(shapes, tensors, rules, missing=("b", "head"), unused=("ids", "b$"))


def test_incomplete_stack_is_missing_and_its_parts_unused():
    stacked = rule("layer.{i}.w", "w")
    gap = {"layer.0.w": tensor(2), "layer.2.w": tensor(2)}
    report = compare({"w": zeros(2, 2)}, gap, [stacked])
    assert report.missing == {"w": "layer.{i}.w"} and report.unused == tuple(gap)
    part = rule("{part}", "w", "part o -> (part o)", part=("q", "k"))
    assert compare({"w": zeros(4)}, {"q": tensor(2)}, [part]).missing == {"w": "{part}"}


class Unread(dict):
    """Tensors that note which of them are read."""

    def __init__(self, tensors: dict[str, Any]):
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.read.append(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("values", [("0", "1", "2"), 3, None], ids=["names", "number", "none"])
@pytest.mark.parametrize("length", [6, 4])
def test_compare_reads_no_tensor_but_to_count(values, length):
    declared = {} if values is None else {"part": values}
    # Without values a pattern cannot say how long a part is, but the tensor can.
    dims = None if values is None else "(part o) -> part o"
    shape = (3, length) if values is None else (length,)
    tensors = Unread({"qkv": tensor(*shape), "extra": tensor(1)})
    template = {"b": [zeros(length if values is None else 2) for _ in range(3)]}
    rules = [rule("qkv", "b.{part}", dims, **declared)]
    report = compare(template, tensors, rules)
    assert report.loaded == {f"b.{i}": ("qkv",) for i in range(3)}
    assert report.missing == {} and report.unused == ("extra",)
    assert tensors.read == ([] if values is not None else ["qkv"])
    if values is not None and length == 4:
        with pytest.raises(ValueError, match=r"`qkv` of shape \(4,\).*Correct the pattern"):
            load(template, tensors, rules, unused=("extra",))
        return
    tensors.read.clear()
    loaded = load(template, tensors, rules, unused=("extra",))["b"]
    assert tensors.read == ["qkv"]
    np.testing.assert_array_equal(loaded, dict.__getitem__(tensors, "qkv").reshape(3, -1))


def test_export_refuses_leaves_without_a_rule():
    model = {"a": zeros(2), "step": jnp.int32(3)}
    with pytest.raises(ValueError, match="Every leaf must have a rule. Got `step` without one"):
        export(model, [rule("a", "a")])
    assert list(export(model, [rule("a", "a")], unused=("step",))) == ["a"]


def test_shape_and_dtype_that_differ_raise_by_both_names():
    plain = [rule("fc.weight", "linear.weight")]
    template = {"linear": {"weight": zeros(3, 2)}}
    with pytest.raises(
        ValueError, match=r"Got `fc\.weight` as \(2, 3\) for `linear\.weight`, .*float32\[3,2\]"
    ):
        load(template, {"fc.weight": tensor(2, 3)}, plain)
    half = {"fc.weight": tensor(3, 2).astype(np.float16)}
    with pytest.raises(
        ValueError, match=r"Got `fc\.weight` as float16 for `linear\.weight`.*Pass `cast=True`"
    ):
        load(template, half, plain)
    loaded = load(template, half, plain, cast=True)["linear"]["weight"]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, half["fc.weight"].astype(np.float32))
    numbers = {"fc.weight": np.ones((3, 2), np.int32)}
    with pytest.raises(ValueError, match=r"as int32 for `linear\.weight`.*Correct the rule\."):
        load(template, numbers, plain, cast=True)


def test_dims_that_do_not_fit_raise_by_rule_and_tensor():
    convolution = rule("conv.weight", "w", "o i h w -> h w i o")
    with pytest.raises(ValueError, match=r"`conv\.weight` -> `w` by 'o i h w.*of shape \(2, 3\)"):
        load({"w": zeros(1, 1, 3, 2)}, {"conv.weight": tensor(2, 3)}, [convolution])
    stacked = rule("layer.{i}.w", "w")
    uneven = {"layer.0.w": tensor(2), "layer.1.w": tensor(3)}
    with pytest.raises(ValueError, match=r"Got `layer\.0\.w` \(2,\), `layer\.1\.w` \(3,\) for"):
        load({"w": zeros(2, 2)}, uneven, [stacked])


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"must come first.*those of the source are \['layer'\]"):
        rule("{layer}.w", "w", "o layer i -> layer i o")
    with pytest.raises(ValueError, match=r"those of the target are \['part'\]"):
        rule("w", "{part}.w", "o i -> i o")
    with pytest.raises(ValueError, match="Pass a pattern such as 'layer o i -> part i o'"):
        rule("{layer}.w", "{part}.w")
    twice = [rule("a", "w"), rule("b", "w")]
    with pytest.raises(ValueError, match="Got `w` from `a` -> `w` and from `b` -> `w`"):
        load({"w": zeros(2)}, {"a": tensor(2), "b": tensor(2)}, twice)
    with pytest.raises(ValueError, match="Got `a` from `a` -> `v` and from `a` -> `w`"):
        export({"v": zeros(2), "w": zeros(2)}, [rule("a", "v"), rule("a", "w")])


def test_tensor_may_fill_two_leaves():
    both = [rule("a", "v"), rule("a", "w")]
    loaded = load({"v": zeros(2), "w": zeros(2)}, {"a": tensor(2)}, both)
    assert loaded["v"] is not loaded["w"]


def test_prefixed_rules_are_those_of_a_part():
    moved = prefixed([rule("{i}.w", "w.{i}", "o i -> i o")], source="net.", target="body.")
    loaded = load({"body": {"w": [zeros(3, 2)]}}, {"net.0.w": tensor(2, 3)}, moved)
    np.testing.assert_array_equal(loaded["body"]["w"][0], tensor(2, 3).T)


class Norms(eqx.Module):
    """Whose second norm is made first, so that the state has another order than the model."""

    first: eqx.nn.StateIndex
    second: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.second = eqx.nn.StateIndex((jnp.zeros(2), jnp.ones(2)))
        self.first = eqx.nn.StateIndex((jnp.zeros(3), jnp.ones(3)))


def test_state_goes_by_the_place_of_its_index():
    model, state = eqx.nn.make_with_state(Norms)()
    rules = [
        rule("{bn}.running_mean", "{bn}.0", bn=("first", "second")),
        rule("{bn}.running_var", "{bn}.1", bn=("first", "second")),
    ]
    tensors = {
        f"{bn}.running_{what}": tensor(size, seed=seed)
        for bn, size in (("first", 3), ("second", 2))
        for seed, what in enumerate(("mean", "var"))
    }
    for given in ((model, state), eqx.filter_eval_shape(lambda: (model, state))):
        new_model, new_state = load(given, tensors, rules)
        for bn in ("first", "second"):
            mean, variance = new_state.get(getattr(new_model, bn))
            np.testing.assert_array_equal(mean, tensors[f"{bn}.running_mean"])
            np.testing.assert_array_equal(variance, tensors[f"{bn}.running_var"])
    back = export((new_model, new_state), rules)
    assert back.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(back[name], array)
    assert state.get(model.first)[0].max() == 0  # the template's is as it was


def test_leaves_keep_their_sharding():
    sharding = NamedSharding(et.mesh(data=4), P("data"))
    template = {"w": jax.device_put(zeros(8, 2), sharding)}
    shapes = {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)}
    for given in (template, shapes):
        loaded = load(given, {"w": tensor(8, 2)}, [rule("w", "w")])["w"]
        assert loaded.sharding == sharding
        np.testing.assert_array_equal(loaded, tensor(8, 2))
    np.testing.assert_array_equal(export({"w": loaded}, [rule("w", "w")])["w"], tensor(8, 2))


def test_program_starts_from_loaded_weights_and_leaves_them_alone():
    given = tensor(8)

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean((batch["x"] @ model["w"]) ** 2), state, {}

    def make(key: Any) -> Any:
        return load({"w": jax.random.normal(key, (8,))}, {"w": given}, [rule("w", "w")])

    placed = et.shard(et.mesh(data=4), batch=P("data"), model=et.fsdp("data", min_size=1))
    step = et.pipe(loss, placed, et.update(optax.sgd(0.1)), et.donate)
    ts = step.init(make, key=jax.random.key(0))
    np.testing.assert_array_equal(ts.model["w"], given)
    assert ts.model["w"].addressable_shards[0].data.shape == (2,)
    ts, _ = step(ts, {"x": jnp.ones((4, 8))})
    np.testing.assert_array_equal(given, tensor(8))
    np.testing.assert_allclose(
        ts.model["w"], given - 0.1 * 2 * given.sum() * np.ones(8), rtol=1e-5, atol=1e-6
    )


def test_files_hold_what_was_written(tmp_path):
    pytest.importorskip("safetensors")
    first = {"a": tensor(2, 3), "scale": np.array(3.0, np.float32)}
    second = {"b": jnp.arange(3, dtype=jnp.bfloat16)}
    write(tmp_path / "model-00001.safetensors", first)
    write(tmp_path / "model-00002.safetensors", second)
    both = read(tmp_path)
    assert both.keys() == {"a", "scale", "b"}
    for name, array in {**first, **second}.items():
        np.testing.assert_array_equal(both[name], np.asarray(array))
        assert both[name].dtype == array.dtype
    assert read(tmp_path / "model-00002.safetensors").keys() == {"b"}
    with pytest.raises(FileNotFoundError, match="Got .*nowhere, where there is none"):
        read(tmp_path / "nowhere")


def test_state_dict_of_torch_loads_and_takes_back():
    torch = pytest.importorskip("torch")
    network = torch.nn.Linear(3, 2)
    network.brain = torch.nn.Parameter(torch.arange(4.0).bfloat16())
    rules = [rule("weight", "weight", "o i -> i o"), rule("bias", "bias"), rule("brain", "brain")]
    template = {"weight": zeros(3, 2), "bias": zeros(2), "brain": jnp.zeros(4, jnp.bfloat16)}
    for tensors in (network.state_dict(), dict(network.named_parameters())):
        loaded = load(template, tensors, rules)
        np.testing.assert_array_equal(loaded["weight"], network.weight.detach().numpy().T)
        np.testing.assert_array_equal(loaded["brain"], np.arange(4.0))
    with torch.no_grad():
        network.weight.zero_()
    assert np.abs(loaded["weight"]).max() > 0  # shares no memory
    back = export({**loaded, "brain": loaded["brain"].astype(jnp.float32)}, rules)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in back.items()})
    np.testing.assert_array_equal(network.weight.detach().numpy().T, loaded["weight"])
