"""PyTorch, as a contender of `benchmarks/compare_models.py`: transformers' ResNets and Llamas.

ResNets are channels_last, with each ReLU in place as in torchvision's, which do not load beside a
PyTorch that is built for CPUs alone. Llamas have sdpa attention. Optimizers are in their fused
form, there are as many threads as cores, and `--compile` compiles the loss with the model.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks import model_data
from benchmarks.peers import torch_llama
from benchmarks.peers.served import Stepper, serve


def make_resnet(config: dict[str, Any]) -> Any:
    width = 4 if config["bottleneck"] else 1
    first = config["widths"][0]
    model = torch_llama.library.ResNetForImageClassification(
        torch_llama.library.ResNetConfig(
            embedding_size=first,
            hidden_sizes=[width * channels for channels in config["widths"]],
            depths=config["depths"],
            layer_type="bottleneck" if config["bottleneck"] else "basic",
            num_labels=config["num_classes"],
        )
    )
    if config["stem"] == "small":
        embedder = model.resnet.embedder
        embedder.embedder.convolution = nn.Conv2d(3, first, 3, padding=1, bias=False)
        embedder.pooler = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return model.to(memory_format=torch.channels_last)


def make_llama(config: dict[str, Any]) -> Any:
    model = torch_llama.make_llama(config)
    if config["remat"]:
        model.activation_checkpointing_enable()
    return model


def make_loss(model: Any, kind: str, batch: dict[str, np.ndarray]) -> Callable[[], Any]:
    if kind == "llama":
        tokens, labels = (torch.from_numpy(batch[name]).long() for name in ("tokens", "labels"))

        def text_loss() -> Any:
            logits = model(input_ids=tokens).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return text_loss
    # Channels last in memory, and named as if they came first.
    image = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)
    label = torch.from_numpy(batch["label"]).long()
    return lambda: nn.functional.cross_entropy(model(pixel_values=image).logits, label)


def make_stepper(
    compiled: bool, batch: dict[str, np.ndarray], config: dict[str, Any], weights: str
) -> Stepper:
    make = make_llama if config["kind"] == "llama" else make_resnet
    model = make(config)
    missing, unused = model.load_state_dict(load_file(weights), strict=False)
    if unused or any("num_batches_tracked" not in name for name in missing):
        raise ValueError(
            "Weights must fill the model. "
            f"Got tensors without a place {unused} and places without a tensor {missing}. "
            "Make both from the same config."
        )
    model.train()
    loss_of = make_loss(model, config["kind"], batch)
    if compiled:
        loss_of = torch.compile(loss_of)
    optimizer: torch.optim.Optimizer
    if config["kind"] == "llama":
        rates = model_data.ADAMW
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rates["learning_rate"],
            weight_decay=rates["weight_decay"],
            fused=True,
        )
    else:
        rates = model_data.SGD
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=rates["learning_rate"],
            momentum=rates["momentum"],
            weight_decay=rates["weight_decay"],
            fused=True,
        )

    def run(num_steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of()
            loss.backward()
            optimizer.step()
        return loss.item()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="with `torch.compile`")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    serve(model_data.made_up_batch, functools.partial(make_stepper, args.compile))


if __name__ == "__main__":
    main()
