"""What the jobs of `benchmarks/compare_models.py` share in all frameworks: batches and rates."""

from __future__ import annotations

import numpy as np

# SGD with momentum for images, AdamW for text.
SGD = {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW = {"learning_rate": 1e-4, "weight_decay": 0.01}


def images(rows: int, side: int, classes: int) -> dict[str, np.ndarray]:
    """Noise in three channels, those last."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(rows, side, side, 3)).astype(np.float32),
        "label": rng.integers(0, classes, size=rows, dtype=np.int32),
    }


def text(rows: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Tokens drawn evenly, and as labels those one further."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length + 1), np.int32)
    return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


def made_up_batch(kind: str, **sizes: int) -> dict[str, np.ndarray]:
    return images(**sizes) if kind == "resnet" else text(**sizes)
