"""Fine-tunes MiniLM, a BERT of 6 layers, to tell what a dictionary's gloss is about.

    python benchmarks/finetune_bert.py
    python benchmarks/finetune_bert.py --dataset newsgroups --epochs 3
    python benchmarks/finetune_bert.py --limit 2000

Needs the extra `bench`; weights and texts are fetched once, 90 MB. The default is one epoch of
73,858 glosses of WordNet in 25 supersenses ("noun.animal", "noun.artifact", ...), tokenised once
and batched by length. It prints a table beside TF-IDF with a linear SVM, leaves a run folder with
`metrics.jsonl` and `curves.png`, and its last line is JSON. `benchmarks/peers/torch_bert.py` is the
same job in PyTorch: the same weights, batches, order and schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import eqtrain as et
from benchmarks import bert_data, datasets
from benchmarks.environment import environment
from benchmarks.memory import peak_bytes
from benchmarks.run_folder import RunFolder
from models.bert import MINILM
from models.bert_heads import MeanClassifier, SequenceClassifier, hugging_face

Classifier = SequenceClassifier | MeanClassifier


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    bert_data.add_arguments(parser)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--run", type=Path, help="folder of the run")
    parser.add_argument("--no-baseline", action="store_true", help="leave out TF-IDF")
    return parser.parse_args()


def make_model(dataset: str, dropout: float) -> Callable[[jax.Array], Classifier]:
    """The function that `init` takes: MiniLM's weights, and a new head."""
    config = dataclasses.replace(MINILM, dropout=dropout, attention_dropout=dropout)
    tensors = et.interop.read(datasets.minilm())
    num_classes = bert_data.NUM_CLASSES[dataset]
    kind, unused = {
        "first": (SequenceClassifier, ("position_ids",)),
        "mean": (MeanClassifier, ("position_ids", "^pooler")),
    }[bert_data.POOLING[dataset]]

    def make(key: jax.Array) -> Classifier:
        model = kind(config, num_classes, key=key)
        head = bert_data.first_head(num_classes, config.dim)
        model = eqx.tree_at(lambda model: model.head.weight, model, head.T)
        rules = hugging_face(prefix="")
        return et.interop.load(model, tensors, rules, missing=("^head",), unused=unused)

    return make


def loss(model: Classifier, state: Any, batch: Any, key: Any) -> Any:
    logits = model(batch["tokens"], batch["mask"], key=key)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit, weight = logits.argmax(-1) == batch["label"], batch["weight"]
    return et.mean(nll, where=weight), state, {"accuracy": et.mean(hit, where=weight)}


def make_step(
    schedule: optax.Schedule | float, precision: str = "float32", shapes: int = 1
) -> et.Program:
    """The training step, to be compiled for so many shapes of a batch."""
    # Weights of products and of embeddings decay; norms' scales and all biases do not.
    optimizer = optax.adamw(
        schedule, weight_decay=bert_data.WEIGHT_DECAY, mask=et.matching("weight$", but="norm")
    )
    return et.pipe(
        loss,
        et.precision(precision),
        et.update(optimizer),
        et.guard,
        et.donate(max_compilations=shapes),
    )


def make_schedule(total: int, peak: float) -> optax.Schedule:
    """`bert_data.learning_rate`, of a number that is traced."""
    warmup = max(int(bert_data.WARMUP * total), 1)
    up = optax.linear_schedule(0.0, peak, warmup)
    down = optax.linear_schedule(peak, 0.0, max(total - warmup, 1))
    return optax.join_schedules([up, down], [warmup])


def fit(
    args: argparse.Namespace, train: bert_data.Rows, test: bert_data.Rows, run: RunFolder
) -> dict[str, Any]:
    """Trains and evaluates; the figures of the run."""
    buckets = bert_data.BUCKETS[args.dataset]
    per_epoch = bert_data.num_batches(train, buckets, args.batch_size)
    total = args.epochs * per_epoch
    schedule = make_schedule(total, args.learning_rate)
    train_step = make_step(schedule, args.precision, shapes=len(buckets))

    def still(model: Classifier, state: Any, batch: Any, key: Any) -> Any:
        return loss(model, state, batch, None)  # no key, no dropout

    measure = et.pipe(
        still, et.precision(args.precision), et.evaluate(max_compilations=len(buckets))
    )

    def evaluate(ts: et.TrainState) -> dict[str, float]:
        batches = bert_data.batches(test, buckets, args.batch_size)
        return et.fetch(et.merge(*(measure(ts, batch) for batch in batches)))

    start = time.perf_counter()
    make = make_model(args.dataset, args.dropout)
    ts = train_step.init(make, key=jax.random.key(args.seed))
    jax.block_until_ready(ts.leaves)
    figures = {"init_seconds": time.perf_counter() - start}
    step, window, compile_seconds, evaluation_seconds = 0, [], 0.0, 0.0
    tested: dict[str, float] = {}
    start = time.perf_counter()
    for epoch in range(args.epochs):
        seed = 1000 * args.seed + epoch
        for batch in bert_data.batches(train, buckets, args.batch_size, seed=seed):
            before, compilations = time.perf_counter(), train_step.compilations
            ts, metrics = train_step(ts, batch)
            if train_step.compilations > compilations:
                jax.block_until_ready(ts.leaves)
                compile_seconds += time.perf_counter() - before
            step += 1
            window.append(metrics)
            if step % args.log_every == 0 or step == total:
                logged = et.fetch(et.merge(*window))
                run.write({"step": step, **{f"train_{name}": v for name, v in logged.items()}})
                run.show(step, f"loss {logged['loss']:.4f}  accuracy {logged['accuracy']:.1%}")
                window.clear()
        before = time.perf_counter()
        tested = evaluate(ts)
        evaluation_seconds += time.perf_counter() - before
        run.write({"step": step, **{f"test_{name}": value for name, value in tested.items()}})
    train_seconds = time.perf_counter() - start - evaluation_seconds
    train_step.check(ts)
    return {
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
        "steps": total,
        "skipped_steps": int(ts.extra["guard"]["skipped"]),
        **figures,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "evaluation_seconds": evaluation_seconds,
        "examples_per_second": args.epochs * len(train) / (train_seconds - compile_seconds),
        "compilations": train_step.compilations,
    }


def baseline(dataset: str, limit: int | None) -> float | None:
    """The test accuracy of TF-IDF with a linear SVM; None without scikit-learn."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC
    except ImportError:
        return None
    (train, train_labels), (test, test_labels) = datasets.load_texts(dataset)
    if limit is not None and limit < len(train):
        rows = np.random.default_rng(0).permutation(len(train))[:limit]
        train, train_labels = [train[row] for row in rows], train_labels[rows]
    vectorizer: Any = TfidfVectorizer(sublinear_tf=True)
    classifier: Any = LinearSVC(random_state=0).fit(vectorizer.fit_transform(train), train_labels)
    return float(classifier.score(vectorizer.transform(test), test_labels))


def main() -> None:
    args = arguments()
    started = time.perf_counter()
    console = Console()
    run = RunFolder(args.dataset, args.run, console)
    train, test = (rows.first(args.limit) for rows in bert_data.load(args.dataset))
    total = args.epochs * bert_data.num_batches(
        train, bert_data.BUCKETS[args.dataset], args.batch_size
    )

    with run.steps(total):
        figures = fit(args, train, test, run)

    # Before the baseline, which is not of the job.
    figures["total_seconds"] = time.perf_counter() - started
    figures["peak_bytes"] = peak_bytes()
    figures["tfidf_accuracy"] = None if args.no_baseline else baseline(args.dataset, args.limit)
    plot(run.lines, figures, args.dataset, run.path / "curves.png")
    console.print(table(figures, args))
    console.print(f"The run is in {run.path}/: metrics.jsonl, curves.png")
    settings = {name: value for name, value in vars(args).items() if name != "run"}
    print(json.dumps({"benchmark": "finetune_bert", **figures, **settings, **environment()}))


def table(figures: dict[str, Any], args: argparse.Namespace) -> Table:
    grid = Table(
        title=f"MiniLM on {args.dataset}: {args.epochs} epochs, {args.precision}",
        title_justify="left",
        show_header=False,
    )
    tfidf = figures["tfidf_accuracy"]
    for name, value in (
        ("test accuracy", f"{figures['test_accuracy']:.2%}"),
        ("of TF-IDF with a linear SVM", "not measured" if tfidf is None else f"{tfidf:.2%}"),
        ("steps", f"{figures['steps']:,}"),
        ("examples/s, compiled", f"{figures['examples_per_second']:.1f}"),
        ("training", f"{figures['train_seconds']:.1f} s"),
        ("of which compilation", f"{figures['compile_seconds']:.1f} s"),
        ("evaluation", f"{figures['evaluation_seconds']:.1f} s"),
        ("compilations", f"{figures['compilations']}"),
        ("skipped steps", f"{figures['skipped_steps']}"),
        ("whole run", f"{figures['total_seconds']:.1f} s"),
        ("peak memory", f"{figures['peak_bytes'] / 1e9:.2f} GB"),
    ):
        grid.add_row(name, value)
    return grid


def plot(lines: list[dict[str, Any]], figures: dict[str, Any], dataset: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [line for line in lines if "train_loss" in line]
    tested = [line for line in lines if "test_accuracy" in line]
    steps = [line["step"] for line in trained]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(steps, [line["train_loss"] for line in trained])
    left.set(xlabel="step", ylabel="training loss")
    right.plot(steps, [line["train_accuracy"] for line in trained], label="training")
    right.plot(
        [line["step"] for line in tested],
        [line["test_accuracy"] for line in tested],
        "o",
        label=f"test, at the end: {figures['test_accuracy']:.2%}",
    )
    if figures["tfidf_accuracy"] is not None:
        right.axhline(figures["tfidf_accuracy"], color="C2", linestyle="--", label="TF-IDF, test")
    right.set(xlabel="step", ylabel="accuracy")
    right.legend(loc="lower right")
    figure.suptitle(f"MiniLM on {dataset}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
