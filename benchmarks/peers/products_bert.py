"""The floor of `benchmarks/compare_bert.py`: the matrix products of a BERT's step and nothing else.

Each product of the forward and the backward pass, as XLA computes it alone from arrays of its
shape, one after another. The pooler and the head, a thousandth of the whole, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import jax.numpy as jnp

from benchmarks import bert_data
from benchmarks.peers.served import Stepper, serve
from models.bert import MINILM

# Of y = x @ w: y, the gradient of x, and that of w; with heads in front, of both factors.
PRODUCTS = {
    "forward": ("mi,io->mo", "x", "w"),
    "to inputs": ("mo,io->mi", "y", "w"),
    "to weights": ("mi,mo->io", "x", "y"),
}


def flops(num_rows: int, length: int) -> int:
    """Of one step."""
    dim, tokens = MINILM.dim, num_rows * length
    linear = tokens * dim * (4 * dim + 2 * MINILM.hidden_dim)
    attention = 2 * tokens * length * dim
    return MINILM.num_layers * 3 * 2 * (linear + attention)


def products(num_rows: int, length: int) -> list[tuple[Callable[..., Any], Any, Any]]:
    """The products of one layer, each with its two arrays."""
    dim, hidden, heads = MINILM.dim, MINILM.hidden_dim, MINILM.num_heads
    tokens, groups = num_rows * length, num_rows * heads
    # Leading dims; then m, i, o of `PRODUCTS`.
    shapes: list[tuple[tuple[int, ...], int, int, int]] = [
        ((), tokens, dim, 3 * dim),
        ((), tokens, dim, dim),
        ((), tokens, dim, hidden),
        ((), tokens, hidden, dim),
        ((groups,), length, dim // heads, length),  # the scores
        ((groups,), length, length, dim // heads),  # what they weigh
    ]
    found = []
    for lead, m, i, o in shapes:
        key = jax.random.key(0)
        arrays = {
            "x": jax.random.normal(key, (*lead, m, i)),
            "w": jax.random.normal(key, (*lead, i, o)),
            "y": jax.random.normal(key, (*lead, m, o)),
        }
        for pattern, a, b in PRODUCTS.values():
            if lead:
                pattern = "g" + pattern.replace(",", ",g").replace("->", "->g")
            product = jax.jit(lambda a, b, pattern=pattern: jnp.einsum(pattern, a, b))
            found.append((product, arrays[a], arrays[b]))
    return found


def make_stepper(batch: bert_data.Batch, dropout: float) -> Stepper:
    found = products(*batch["tokens"].shape)

    def run(num_steps: int) -> float:
        for _ in range(num_steps * MINILM.num_layers):
            for product, a, b in found:
                product(a, b).block_until_ready()
        return 0.0

    return run


if __name__ == "__main__":
    serve(bert_data.made_up_batch, make_stepper)
