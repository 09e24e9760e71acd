"""Ours, as a contender of `benchmarks/compare_models.py`: ResNets and Llamas of `models/`.

What a model is made with comes as JSON: its `kind`, and the fields of a `resnet.Size` with what
else `ResNet` takes, or those of a `LlamaConfig` with `remat`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import equinox as eqx
import jax
import numpy as np
import optax

import eqtrain as et
from benchmarks import model_data
from benchmarks.peers.eqtrain_stepper import stepper_of
from benchmarks.peers.served import Stepper, serve
from models import llama, resnet


def make_model(config: dict[str, Any]) -> tuple[Callable[..., Any], tuple[et.interop.Rule, ...]]:
    """What makes the model from a key, with the state of a ResNet, and the rules of its weights."""
    given = dict(config)
    if given.pop("kind") == "llama":
        remat = given.pop("remat")
        sizes = llama.LlamaConfig(**given)
        return (lambda key: llama.Llama(sizes, axis=None, remat=remat, key=key)), llama.HUGGING_FACE
    depths, widths = tuple(given.pop("depths")), tuple(given.pop("widths"))
    size = resnet.Size(depths, widths, given.pop("bottleneck"))
    make = eqx.nn.make_with_state(resnet.ResNet)
    return (lambda key: make(size, **given, key=key)), resnet.hugging_face(size)


def write_weights(path: Path, config: dict[str, Any]) -> None:
    """Writes first weights, by the names that transformers has for them."""
    make, rules = make_model(config)
    et.interop.write(path, et.interop.export(eqx.filter_jit(make)(jax.random.key(0)), rules))


def image_loss(model: resnet.ResNet, state: Any, batch: Any, key: Any) -> Any:
    logits, state = model(batch["image"], state)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return et.mean(nll), state, {}


def text_loss(model: llama.Llama, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(model.nll(batch["tokens"], batch["labels"])), state, {}


def make_step(kind: str) -> et.Program:
    if kind == "llama":
        loss, rates = text_loss, model_data.ADAMW
        optimizer = optax.adamw(rates["learning_rate"], weight_decay=rates["weight_decay"])
    else:
        loss, rates = image_loss, model_data.SGD
        optimizer = optax.chain(
            optax.add_decayed_weights(rates["weight_decay"]),
            optax.sgd(rates["learning_rate"], momentum=rates["momentum"]),
        )
    return et.pipe(loss, et.update(optimizer), et.guard, et.donate)


def make_stepper(batch: dict[str, np.ndarray], config: dict[str, Any], weights: str) -> Stepper:
    make, rules = make_model(config)
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    given = et.interop.load(shapes, et.interop.read(weights), rules)
    step = make_step(config["kind"])
    ts = step.init(lambda key: given, key=jax.random.key(0))
    del given
    return stepper_of(step, ts, batch)


if __name__ == "__main__":
    serve(model_data.made_up_batch, make_stepper)
