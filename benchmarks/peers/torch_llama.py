"""transformers' Llama of the sizes of `models/llama.py`'s, for the peers in PyTorch."""

from __future__ import annotations

from typing import Any

import transformers

# Its own types leave out what its decorators add.
library: Any = transformers


def make_llama(config: dict[str, Any]) -> Any:
    """`LlamaForCausalLM` with sdpa attention; `config` has the fields of our `LlamaConfig`."""
    settings: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"],
        "intermediate_size": config["hidden_dim"],
        "rms_norm_eps": config["norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "tie_word_embeddings": config["tied"],
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    return library.LlamaForCausalLM(library.LlamaConfig(**settings))
