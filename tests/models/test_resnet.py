"""ResNets against transformers' of the same weights, published sizes, and themselves on a mesh."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models.resnet import RESNET_18, RESNET_50, RESNET_TINY, ResNet, Size, hugging_face
from tests.tiers import default

# One block with an identity as its shortcut, and one with a convolution: quick to compile.
SMALL = Size((1, 1), (8, 16))


def make(key: Any, **options: Any) -> tuple[ResNet, eqx.nn.State]:
    return eqx.nn.make_with_state(ResNet)(
        SMALL, channels=1, num_classes=10, stem="small", key=key, **options
    )


@pytest.mark.parametrize(("size", "count"), [(RESNET_18, 11_689_512), (RESNET_50, 25_557_032)])
def test_parameter_counts_are_the_published_ones(size, count):
    make_imagenet = functools.partial(eqx.nn.make_with_state(ResNet), size, num_classes=1000)
    model, _ = eqx.filter_eval_shape(make_imagenet, key=jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(model, lambda leaf: hasattr(leaf, "shape")))
    assert sum(leaf.size for leaf in leaves) == count


def torch_resnet(size: Size, classes: int) -> Any:
    """The ImageNet network of transformers."""
    transformers = pytest.importorskip("transformers")
    width = 4 if size.bottleneck else 1
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=size.widths[0],
            hidden_sizes=[width * channels for channels in size.widths],
            depths=list(size.depths),
            layer_type="bottleneck" if size.bottleneck else "basic",
            num_labels=classes,
        )
    )


def with_tensors(size: Size, tensors: Any) -> tuple[ResNet, eqx.nn.State]:
    """The ImageNet network of these tensors and its state, with nothing drawn or compiled."""
    make_imagenet = functools.partial(eqx.nn.make_with_state(ResNet), size, num_classes=10)
    shapes = eqx.filter_eval_shape(make_imagenet, key=jax.random.key(0))
    return et.interop.load(shapes, tensors, hugging_face(size), unused=("num_batches_tracked",))


def randomise(network: Any, rng: Any, *, gates: bool) -> None:
    """Draws the scales and biases of a PyTorch network.

    With `gates` every ReLU is well open or well shut. Where an input of one is within a rounding
    error of 0, gradients are off by a tenth, in PyTorch's float32 as in ours.
    """
    from torch import nn

    def draw(norm: Any, signs: list[float]) -> None:
        shape = tuple(norm.weight.shape)
        scale = rng.uniform(0.5, 1.0, size=shape)
        bias = 6 * rng.choice(signs, size=shape) if gates else rng.normal(size=shape)
        for parameter, value in ((norm.weight, scale), (norm.bias, bias)):
            parameter.data = parameter.new_tensor(value)

    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            draw(module, [-1.0, 1.0])
    for block in network.modules():
        if hasattr(block, "shortcut"):  # what is added up has to be far from 0 too
            draw(block.layer[-1].normalization, [1.0])
            if not isinstance(block.shortcut, nn.Identity):
                draw(block.shortcut.normalization, [1.0])


def relative(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


# Each kind of block twice, one behind a shortcut that is a convolution, in fewer stages: what is
# compiled grows with the blocks. The whole networks are in the grid.
SIZES = {
    "basic": Size((2, 1), (64, 128)),
    "bottleneck": Size((2, 1), (64, 128), bottleneck=True),
    "18": RESNET_18,
    "50": RESNET_50,
}


@pytest.mark.parametrize("name", default(list(SIZES), ["basic", "bottleneck"]))
def test_training_matches_torch(name):
    size = SIZES[name]
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 64, 64, 3)).astype(np.float32)
    label = np.arange(4)
    torch.manual_seed(0)
    network = torch_resnet(size, classes=10)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]

    @eqx.filter_jit
    def ours(model: ResNet, state: eqx.nn.State) -> Any:
        def loss(model: ResNet) -> Any:
            logits, after = model(jnp.asarray(x), state)
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(label))
            return nll.sum(), (logits, after)

        return eqx.filter_grad(loss, has_aux=True)(model)

    def both(*, gates: bool) -> Any:
        """Ours in float32, and PyTorch's of the same weights in float64."""
        randomise(network.float(), rng, gates=gates)
        with torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
        model, state = with_tensors(size, network.state_dict())
        grads, (logits, after) = ours(model, state)
        network.double().zero_grad()
        logits_torch = network(torch.tensor(x.transpose(0, 3, 1, 2)).double()).logits
        nll = torch.nn.functional.cross_entropy(logits_torch, torch.tensor(label), reduction="sum")
        nll.backward()
        exported = et.interop.export((grads, after), hugging_face(size))
        return logits, exported, logits_torch.detach().numpy()

    logits, exported, expected = both(gates=False)
    assert relative(logits, expected) < 1e-5
    for name, array in network.state_dict().items():
        if "running_mean" in name:
            assert relative(exported[name], array.numpy()) < 1e-4
        elif "running_var" in name:
            # Unbiased there, of 4 numbers for each of the pixels, 2 * 2 at the least.
            assert relative(exported[name], array.numpy()) < 1 / 15

    logits, exported, expected = both(gates=True)
    assert relative(logits, expected) < 1e-5
    grads = {name: weight.grad.numpy() for name, weight in network.named_parameters()}
    assert grads.keys() == {name for name in exported if "running" not in name}
    for kind in ("convolution.weight", "normalization.weight", "normalization.bias", "classifier"):
        of_kind = {name: array for name, array in grads.items() if kind in name}
        largest = max(np.abs(array).max() for array in of_kind.values())
        for name, array in of_kind.items():
            # Of two pixels equal to rounding, the pool may choose either; it shows in the stem.
            tolerance = 1e-2 if "embedder" in name else 1e-4
            assert np.abs(exported[name] - array).max() < tolerance * largest, name


def test_zero_last_scale_starts_blocks_as_their_shortcuts():
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))

    @eqx.filter_jit
    def forward(model: ResNet, state: Any) -> Any:
        return model(x, state)[0]

    def change(model: ResNet, state: Any) -> float:
        """How much the logits move when the residual branches get other weights."""
        where = lambda model: [block.layers[0].conv.weight for block in model.blocks]  # noqa: E731
        other = eqx.tree_at(where, model, replace_fn=lambda weight: weight[::-1])
        return float(np.abs(forward(model, state) - forward(other, state)).max())

    assert change(*make(jax.random.key(0), zero_last_scale=True)) == 0
    assert change(*make(jax.random.key(0))) > 0.1  # negative control


def test_padded_images_change_nothing():
    model, state = make(jax.random.key(0))
    forward = eqx.filter_jit(lambda model, state, x, where: model(x, state, where=where))
    x = jax.random.normal(jax.random.key(1), (6, 8, 8, 1))
    padded = jnp.concatenate((x, 9 + x[:2]))
    expected, state_expected = forward(model, state, x, None)

    def distance(where: Any) -> float:
        logits, after = forward(model, state, padded, where)
        pairs = zip(
            jax.tree.leaves((logits[:6], after)),
            jax.tree.leaves((expected, state_expected)),
            strict=True,
        )
        return max(relative(a, b) for a, b in pairs)

    assert distance(jnp.arange(8) < 6) < 1e-4
    assert distance(jnp.ones(8)) > 0.1  # negative control


def loss(model: ResNet, state: Any, batch: Any, key: Any) -> Any:
    logits, state = model(batch["image"], state, where=batch["weight"])
    logits = logits.astype(jnp.float32)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return et.mean(nll, where=batch["weight"]), state, {}


def step(*transforms: Any, **options: Any) -> et.TrainState:
    """One step of SGD at rate 1, so that the parameters show the gradients' scale."""
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(16, 8, 8, 1)).astype(np.float32),
        "label": np.arange(16, dtype=np.int32) % 10,
        "weight": (np.arange(16) < 9).astype(np.float32),  # 4, 4, 1 and 0 rows on four devices
    }
    program = et.pipe(loss, *transforms, et.update(optax.sgd(1.0)), et.jit)
    ts = program.init(lambda key: make(key, **options), key=jax.random.key(0))
    return program(ts, batch)[0]


@functools.cache
def alone() -> et.TrainState:
    return step()


def test_step_on_a_mesh_is_that_of_one_device():
    def distance(other: et.TrainState) -> float:
        pairs = zip(
            jax.tree.leaves(eqx.filter((alone().model, alone().state), eqx.is_array)),
            jax.tree.leaves(eqx.filter((other.model, other.state), eqx.is_array)),
            strict=True,
        )
        return max(relative(a, b) for a, b in pairs)

    shard = et.shard(et.mesh(data=4), batch=P("data"))
    assert distance(step(shard)) < 1e-4
    assert distance(step(shard, axis_names=())) > 0.1  # negative control: statistics of each device


def test_bfloat16_step_keeps_statistics_in_float32():
    leaves = jax.tree.leaves(step(et.precision("bfloat16")).state)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    for leaf, expected in zip(leaves, jax.tree.leaves(alone().state), strict=True):
        assert relative(leaf, expected) < 0.05  # 8 bits, layer after layer
        assert relative(leaf, expected) > 0


def test_unknown_stem_raises():
    options: Any = {"stem": "cifar"}
    jaxtyping.config.update("jaxtyping_disable", True)  # would refuse it first
    try:
        with pytest.raises(ValueError, match="must be 'imagenet' or 'small'. Got 'cifar'"):
            ResNet(SMALL, num_classes=10, key=jax.random.key(0), **options)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_tiny_network_takes_odd_sizes(getkey):
    model, state = eqx.nn.make_with_state(ResNet)(RESNET_TINY, num_classes=7, key=getkey())
    x = jax.ShapeDtypeStruct((3, 31, 45, 3), jnp.float32)
    logits, after = eqx.filter_eval_shape(model, x, state)
    assert (logits.shape, logits.dtype) == ((3, 7), jnp.float32)
    assert jax.tree.structure(after) == jax.tree.structure(state)
