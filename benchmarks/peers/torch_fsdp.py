"""One of two processes that train the Llama of `benchmarks/sharding.py` by PyTorch over gloo.

Started by that script, and served like `benchmarks/sharding_steps.py`. The model is transformers'
`LlamaForCausalLM`, eager, with sdpa attention and fused AdamW, on one thread a process. `fsdp2` is
`fully_shard` on each layer and on the whole; `fsdp1` and `ddp` are there in case it does not run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.peers.torch_llama import make_llama

# Theirs within a layer -> ours.
LAYER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def make_model(config: dict[str, Any], arrays: Any, remat: bool) -> Any:
    model = make_llama(config)

    def tensor(name: str, index: int | None = None) -> Tensor:
        array = arrays[f"{name}.weight"]
        array = array if index is None else array[index]
        # A linear layer's weight there is (out, in), and the embedding's is as ours.
        turned = array.T if array.ndim == 2 and name != "embedding" else array
        return torch.from_numpy(np.ascontiguousarray(turned))

    state = {
        "model.embed_tokens.weight": tensor("embedding"),
        "model.norm.weight": tensor("norm"),
        "lm_head.weight": tensor("head"),
    }
    for index in range(config["num_layers"]):
        for theirs, own in LAYER.items():
            state[f"model.layers.{index}.{theirs}.weight"] = tensor(f"blocks.{own}", index)
    model.load_state_dict(state)
    model.train()
    if remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def wrap(model: Any, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        policy = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
        )
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Stepper:
    """One contender: the model, its optimizer, and this process's rows."""

    def __init__(self, kind: str, remat: bool, setting: dict[str, Any]):
        arrays = np.load(setting["weights"])
        self.model = wrap(make_model(setting["config"], arrays, remat), kind)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=setting["learning_rate"],
            weight_decay=setting["weight_decay"],
            fused=True,
        )
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tokens, self.labels = (
            torch.from_numpy(np.ascontiguousarray(np.split(arrays[name], world)[rank])).long()
            for name in ("tokens", "labels")
        )

    def run(self, num_steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(num_steps):
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(input_ids=self.tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten())
            loss.backward()
            self.optimizer.step()
            loss = loss.detach()
            dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--setting", required=True, help="JSON: config, weights, and AdamW's")
    args = parser.parse_args()
    setting = json.loads(args.setting)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port)
    dist.init_process_group("gloo", rank=args.process, world_size=2)
    steppers: dict[str, Stepper] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, reply = request["name"], {}
        if request["do"] == "make":
            _, kind, *rest = name.split("_", 2)
            steppers[name] = Stepper(kind, not rest, setting)
        elif request["do"] == "run":
            start = time.perf_counter()
            loss = steppers[name].run(request["steps"])
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        print(json.dumps(reply), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
