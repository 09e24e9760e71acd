"""What the fine-tuning jobs of BERT share, in any framework: tokens, batches, and the schedule.

JAX is not imported here, so that a peer's process holds its own framework alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from jaxtyping import Float, Int

from benchmarks import datasets

# The lengths that batches are padded to; longer texts are cut. A gloss has 17 tokens on average, a
# post 300.
BUCKETS = {"wordnet": (16, 24, 32, 64), "newsgroups": (64, 128)}
NUM_CLASSES = {"wordnet": 25, "newsgroups": 20}
# What the head is given: the vector of the "first" token, behind BERT's own pooler, or the "mean".
POOLING = {"wordnet": "first", "newsgroups": "mean"}
WARMUP = 0.1
WEIGHT_DECAY = 0.01

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Texts as tokens, one behind another, and their labels."""

    tokens: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " rows_and_one"]
    labels: Int[np.ndarray, " rows"]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.starts)

    def first(self, limit: int | None) -> Rows:
        """So many rows drawn at random, the same ones every time; all of them with None."""
        if limit is None or limit >= len(self):
            return self
        chosen = np.sort(np.random.default_rng(0).permutation(len(self))[:limit])
        tokens = [self.tokens[self.starts[row] : self.starts[row + 1]] for row in chosen]
        starts = np.cumsum([0, *map(len, tokens)])
        return Rows(np.concatenate(tokens), starts, self.labels[chosen])


def load(dataset: str) -> tuple[Rows, Rows]:
    """The training and the test rows, tokenised once: they are kept in the cache folder."""
    length = max(BUCKETS[dataset])

    def fetch(download: Path, complete: Path) -> None:
        for split, (texts, labels) in zip(
            ("train", "test"), datasets.load_texts(dataset), strict=True
        ):
            ids = tokenise(texts, length)
            starts = np.cumsum([0, *map(len, ids)])
            tokens = np.concatenate([np.asarray(row, np.int32) for row in ids])
            np.savez(complete / f"{split}.npz", tokens=tokens, starts=starts, labels=labels)

    folder = datasets.cached(f"tokens-{dataset}-{length}", fetch)
    train, test = (Rows(**np.load(folder / f"{split}.npz")) for split in ("train", "test"))
    return train, test


def tokenise(texts: list[str], length: int) -> list[list[int]]:
    """MiniLM's tokens of each text, with its first and last one, cut to `length`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeError(
            "Texts are tokenised by `tokenizers`. Got no such module. Run `pip install tokenizers`."
        ) from error
    tokenizer = Tokenizer.from_file(str(datasets.minilm() / "tokenizer.json"))
    # The file says to pad everything to 128.
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def batches(
    rows: Rows, buckets: tuple[int, ...], batch_size: int, *, seed: int | None = None
) -> Iterator[Batch]:
    """Batches of rows that are about as long, in few shapes, each row once.

    Rows come in an order drawn from `seed`, or in their own with None, and wait in their bucket
    until it is full. What is left in the end is padded with rows of weight 0.

    **Returns:** dicts of `tokens` and `mask`, int32 (rows, bucket), `label`, int32 (rows,), and
    `weight`, float32 (rows,).
    """
    order = np.arange(len(rows))
    if seed is not None:
        np.random.default_rng(seed).shuffle(order)
    bucket_of = np.searchsorted(buckets, np.minimum(rows.lengths, buckets[-1]))
    waiting: list[list[int]] = [[] for _ in buckets]
    for row in order:
        bucket = bucket_of[row]
        waiting[bucket].append(int(row))
        if len(waiting[bucket]) == batch_size:
            yield _stack(rows, waiting[bucket], buckets[bucket], batch_size)
            waiting[bucket] = []
    for bucket, left in enumerate(waiting):
        if left:
            yield _stack(rows, left, buckets[bucket], batch_size)


def num_batches(rows: Rows, buckets: tuple[int, ...], batch_size: int) -> int:
    bucket_of = np.searchsorted(buckets, np.minimum(rows.lengths, buckets[-1]))
    return int(sum(-(-np.bincount(bucket_of) // batch_size)))


def learning_rate(step: int, total: int, peak: float) -> float:
    """Of each step: up from 0 in the first tenth of them, then down to 0, both linear."""
    warmup = max(int(WARMUP * total), 1)
    return peak * min(step / warmup, max(total - step, 0) / max(total - warmup, 1))


def first_head(num_classes: int, dim: int) -> Float[np.ndarray, "classes dim"]:
    """The weight that the last layer starts from; its bias starts from 0."""
    return np.random.default_rng(0).normal(0, 0.02, (num_classes, dim)).astype(np.float32)


def made_up_batch(rows: int, length: int) -> Batch:
    """A batch of the shape that steps are timed on, of ragged rows."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(length // 2, length, rows).astype(int)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
    tokens = rng.integers(1000, 30_000, size=(rows, length), dtype=np.int32)
    return {
        "tokens": tokens * mask,
        "mask": mask,
        "label": rng.integers(0, 25, size=rows, dtype=np.int32),
        "weight": np.ones(rows, np.float32),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of a fine-tuning job in any framework."""
    parser.add_argument("--dataset", choices=BUCKETS, default="wordnet")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, help="rows to train and to test on, for a look")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)


def _stack(rows: Rows, chosen: list[int], length: int, batch_size: int) -> Batch:
    tokens, mask = np.zeros((2, batch_size, length), np.int32)
    label, weight = np.zeros(batch_size, np.int32), np.zeros(batch_size, np.float32)
    for place, row in enumerate(chosen):
        text = rows.tokens[rows.starts[row] : rows.starts[row + 1]][:length]
        tokens[place, : len(text)] = text
        mask[place, : len(text)] = 1
    label[: len(chosen)], weight[: len(chosen)] = rows.labels[chosen], 1
    return {"tokens": tokens, "mask": mask, "label": label, "weight": weight}
