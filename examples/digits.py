"""Trains a small ResNet on scikit-learn's digits: a loop to read, copy and change.

    python examples/digits.py

Needs the extra `bench`, and four devices, which it makes of the CPU. About half a minute on two
cores, and 98 % of the test digits are right. `benchmarks/train_digits.py` measures this job.
"""

import os
import sys
from pathlib import Path

# Before JAX is imported: four devices, and more threads than those.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("NPROC", "16")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import eqtrain as et
from models.resnet import RESNET_TINY, ResNet

STEPS, BATCH_SIZE = 260, 128


def load():
    """1797 pictures of 8 x 8, every fifth of them for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    test = np.arange(len(images)) % 5 == 0
    return [
        {"image": images[part], "label": labels[part].astype(np.int32)} for part in (~test, test)
    ]


def shifted(image, key):
    """Moves a picture by a pixel at most."""
    row, column = jax.random.randint(key, (2,), 0, 3)
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)


def measures(logits, batch, state):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit, weight = logits.argmax(-1) == batch["label"], batch["weight"]
    return et.mean(nll, where=weight), state, {"accuracy": et.mean(hit, where=weight)}


def make(key):
    return eqx.nn.make_with_state(ResNet)(
        RESNET_TINY, channels=1, num_classes=10, stem="small", key=key
    )


def make_programs(mesh, steps):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    # Weights of convolutions and of the head decay; the norms' scales and all biases do not.
    optimizer = optax.adamw(schedule, weight_decay=0.05, mask=et.matching("weight$", but="norm"))

    @et.donate
    @et.guard(nonfinite="skip")
    @et.update(optimizer)
    @et.shard(mesh, batch=P("data"))
    @et.accumulate(2)
    def train_step(model, state, batch, key):
        images = jax.vmap(shifted)(batch["image"], key)  # one key an example
        logits, state = model(images, state, where=batch["weight"])
        return measures(logits, batch, state)

    @et.evaluate
    @et.shard(mesh, batch=P("data"))
    def evaluate(model, state, batch, key):
        logits, state = eqx.nn.inference_mode(model)(batch["image"], state)
        return measures(logits, batch, state)

    return train_step, evaluate


def main(steps=STEPS):
    train, test = load()
    train_step, evaluate = make_programs(et.mesh(data=-1), steps)
    ts = train_step.init(make, key=jax.random.key(0))
    loader = et.data.Loader(train, BATCH_SIZE, seed=0)
    window = []
    with et.data.prefetch(loader, train_step.batch_sharding) as batches:
        for step in range(1, steps + 1):
            ts, metrics = train_step(ts, next(batches))
            window.append(metrics)
            if step % 50 == 0 or step == steps:
                means = et.fetch(et.merge(*window))  # the only place where the devices are read
                print(f"step {step}: loss {means['loss']:.4f}, accuracy {means['accuracy']:.1%}")
                window = []
    train_step.check(ts)
    loader = et.data.Loader(test, BATCH_SIZE, shuffle=False, epochs=1)
    tested = et.fetch(et.merge(*[evaluate(ts, batch) for batch in loader]))
    print(f"test: loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.1%}")
    return tested


if __name__ == "__main__":
    main()
