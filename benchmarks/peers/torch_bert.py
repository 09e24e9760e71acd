"""The job of `benchmarks/finetune_bert.py` in PyTorch: the same weights, batches and schedule.

    python benchmarks/peers/torch_bert.py
    python benchmarks/peers/torch_bert.py --compile --limit 2000

transformers' BERT with sdpa attention, AdamW in its fused form, as many threads as cores, and
`inference_mode` in evaluation. Batches are padded to their longest row; with `--compile`, for
`torch.compile`, to the lengths that ours are padded to, so that there are few shapes. Its last line
is JSON. With `--serve` it is a contender of `benchmarks/compare_bert.py`.
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

import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks import bert_data, datasets
from benchmarks.memory import peak_bytes
from benchmarks.peers.served import Stepper, serve


class MeanClassifier(torch.nn.Module):
    """Logits from the mean of the vectors of a row's tokens."""

    def __init__(self, config: Any):
        super().__init__()
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.dropout = torch.nn.Dropout(config.hidden_dropout_prob)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask[..., None].to(hidden.dtype)
        mean = (hidden * seen).sum(1) / seen.sum(1)
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(mean)))


def make_model(dataset: str, dropout: float, compiled: bool) -> Any:
    folder, num_classes = datasets.minilm(), bert_data.NUM_CLASSES[dataset]
    config = transformers.BertConfig(
        **json.loads((folder / "config.json").read_text())
        | {
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "num_labels": num_classes,
            "attn_implementation": "sdpa",
        }
    )
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("embeddings.position_ids")
    if bert_data.POOLING[dataset] == "mean":
        model = MeanClassifier(config)
        tensors = {name: value for name, value in tensors.items() if "pooler" not in name}
    else:
        model = transformers.BertForSequenceClassification(config)
    state = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    state["classifier.weight"] = torch.from_numpy(
        bert_data.first_head(num_classes, config.hidden_size)
    )
    state["classifier.bias"] = torch.zeros(num_classes)
    model.load_state_dict(state)
    model.train()
    return torch.compile(model) if compiled else model


def make_optimizer(model: Any, learning_rate: float) -> Any:
    """AdamW that leaves norms and biases alone, as ours."""
    decayed = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decayed[name.endswith("weight") and "LayerNorm" not in name].append(parameter)
    groups = [
        {"params": decayed[True], "weight_decay": bert_data.WEIGHT_DECAY},
        {"params": decayed[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


def tensors_of(batch: bert_data.Batch, pad: bool) -> dict[str, Any]:
    """The rows that count, and unless `pad` no more columns than the longest has."""
    rows = int(batch["weight"].sum())
    columns = batch["tokens"].shape[1] if pad else int(batch["mask"][:rows].sum(1).max())
    return {
        "input_ids": torch.from_numpy(batch["tokens"][:rows, :columns]).long(),
        "attention_mask": torch.from_numpy(batch["mask"][:rows, :columns]).long(),
        "labels": torch.from_numpy(batch["label"][:rows]).long(),
    }


def take_step(model: Any, optimizer: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """A step; the loss, and how many rows it got right, both still where they were computed."""
    labels = inputs["labels"]
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach(), (logits.detach().argmax(-1) == labels).sum()


def make_stepper(compiled: bool, batch: bert_data.Batch, dropout: float) -> Stepper:
    model = make_model("wordnet", dropout, compiled)
    optimizer = make_optimizer(model, 1e-4)
    inputs = tensors_of(batch, pad=True)

    def run(num_steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(num_steps):
            loss, _ = take_step(model, optimizer, inputs)
        return loss.item()

    return run


def evaluate(model: Any, rows: bert_data.Rows, args: argparse.Namespace) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    model.eval()
    loss, hits = 0.0, 0
    buckets = bert_data.BUCKETS[args.dataset]
    with torch.inference_mode():
        for batch in bert_data.batches(rows, buckets, args.batch_size):
            inputs = tensors_of(batch, pad=args.compile)
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            hits += int((logits.argmax(-1) == labels).sum())
    model.train()
    return loss / len(rows), hits / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    bert_data.add_arguments(parser)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="with `torch.compile`")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    if args.serve:
        serve(bert_data.made_up_batch, functools.partial(make_stepper, args.compile))
        return
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    buckets = bert_data.BUCKETS[args.dataset]
    train, test = (rows.first(args.limit) for rows in bert_data.load(args.dataset))
    total = args.epochs * bert_data.num_batches(train, buckets, args.batch_size)
    model = make_model(args.dataset, args.dropout, args.compile)
    optimizer = make_optimizer(model, args.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: bert_data.learning_rate(step, total, 1.0)
    )
    step, evaluation_seconds, test_loss, accuracy = 0, 0.0, 0.0, 0.0
    window: list[Any] = []
    start = time.perf_counter()
    for epoch in range(args.epochs):
        seed = 1000 * args.seed + epoch
        for batch in bert_data.batches(train, buckets, args.batch_size, seed=seed):
            inputs = tensors_of(batch, pad=args.compile)
            window.append((*take_step(model, optimizer, inputs), len(inputs["labels"])))
            schedule.step()
            step += 1
            if step % args.log_every == 0 or step == total:
                rows = sum(count for *_, count in window)
                logged = {
                    "step": step,
                    "train_loss": float(sum(loss * count for loss, _, count in window)) / rows,
                    "train_accuracy": int(sum(hits for _, hits, _ in window)) / rows,
                }
                print(json.dumps(logged), flush=True)
                window.clear()
        before = time.perf_counter()
        test_loss, accuracy = evaluate(model, test, args)
        evaluation_seconds += time.perf_counter() - before
        print(json.dumps({"step": step, "test_loss": test_loss, "test_accuracy": accuracy}))
    train_seconds = time.perf_counter() - start - evaluation_seconds
    figures = {
        "benchmark": "torch_bert",
        "test_accuracy": accuracy,
        "test_loss": test_loss,
        "steps": total,
        "train_seconds": train_seconds,
        "evaluation_seconds": evaluation_seconds,
        "examples_per_second": args.epochs * len(train) / train_seconds,
        "total_seconds": time.perf_counter() - started,
        "peak_bytes": peak_bytes(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({**figures, **vars(args)}))


if __name__ == "__main__":
    main()
