"""Trains a small Llama on the characters of Shakespeare, on a mesh of any shape.

    python benchmarks/train_llama.py
    python benchmarks/train_llama.py --mesh data=2,fsdp=2,model=2 --sequence-parallel --steps 100
    python benchmarks/train_llama.py --text my.txt --config LLAMA_25M --precision bfloat16

Needs the extra `bench`. The default takes under 6 minutes on two cores, compilation included, and
ends below 2.2 bits per character on three plays that it has not seen: Henry V, Macbeth and Twelfth
Night, where guessing by frequency takes 4.8. It prints a table and a text of its own, leaves a run
folder with `metrics.jsonl`, `curves.png` and `sample.txt`, and its last line is JSON.

The batch is split over `data` and `fsdp`, parameters over `fsdp` layer by layer, and heads, MLPs
and the vocabulary over `model`. Batches, and what they train, do not depend on the mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Table
from rich.text import Text

import eqtrain as et
from benchmarks import datasets
from benchmarks.environment import environment, make_cpu_devices
from benchmarks.run_folder import RunFolder
from models import llama
from models.llama import Llama, LlamaConfig, tensor_parallel

SMALL = LlamaConfig(
    vocab_size=96, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=352
)
CONFIGS = {
    "small": SMALL,
    **{name: value for name, value in vars(llama).items() if isinstance(value, LlamaConfig)},
}
AXES = ("data", "fsdp", "model")
SAMPLED = 400  # characters


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", type=parse_mesh, default="data=2", help="data=2,fsdp=2,model=2")
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--text", type=Path, help="a text in UTF-8; its last tenth is held out")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=128, help="characters of a row")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="over `model`")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--run", type=Path, help="folder of the run")
    return parser.parse_args()


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all `AXES` from a text such as "data=2,model=4"; 1 for one left out.

    **Raises:** `argparse.ArgumentTypeError` for what is no such text.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"A mesh is written as the sizes of some of {', '.join(AXES)}, each once and 1 or "
                f"more. Got {part!r} in {text!r}. Write data=2,fsdp=2,model=2, for example."
            )
        sizes[name] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def encode(text: str, vocabulary: str) -> Int[np.ndarray, " text"]:
    """Numbers each character by its place in `vocabulary`.

    **Raises:** `ValueError` for one that is not there.
    """
    numbers = {character: number for number, character in enumerate(vocabulary)}
    unknown = set(text) - set(numbers)
    if unknown:
        raise ValueError(
            f"A text must be made of the vocabulary. Got {sorted(unknown)} beside it. Add them."
        )
    return np.fromiter((numbers[character] for character in text), np.int32, len(text))


class Windows:
    """Every stretch of a text that is `length` long, and the same one character further.

    A Loader that shuffles them gives random windows, none of them twice in an epoch.
    """

    def __init__(self, tokens: Int[np.ndarray, " text"], length: int) -> None:
        if len(tokens) <= length:
            raise ValueError(
                f"A text must be longer than its windows. Got {len(tokens)} characters and windows "
                f"of {length}. Use a longer text, or a smaller `--length`."
            )
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, start: int, /) -> dict[str, np.ndarray]:
        window = self.tokens[start : start + self.length + 1]
        return {"tokens": window[:-1], "labels": window[1:]}


class ScoredWindows:
    """Windows half a length apart, which score every character but the first exactly once.

    `scored` marks the labels that no window before has scored. So a character is judged with half
    a length of text before it at least, where the text has that.
    """

    def __init__(self, tokens: Int[np.ndarray, " text"], length: int) -> None:
        self._windows = Windows(tokens, length)
        stride = max(length // 2, 1)
        last = len(self._windows) - 1
        self._starts = [*range(0, last, stride), last]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        start, length = self._starts[index], self._windows.length
        done = self._starts[index - 1] + length if index else 0
        scored = np.arange(start, start + length) >= done
        return {**self._windows[start], "scored": scored.astype(np.float32)}


class Every:
    """Every nth row of a source, for a quick look at it."""

    def __init__(self, source: et.data.RowSource, n: int) -> None:
        self._source = source
        self._n = n

    def __len__(self) -> int:
        return -(-len(self._source) // self._n)

    def __getitem__(self, index: int, /) -> Any:
        return self._source[index * self._n]


def bits_per_character(nll: float) -> float:
    """The mean negative log-likelihood of a character, from nats to bits."""
    return nll / math.log(2)


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, which decay; Adam for the vocabulary and the norms.

    **Reference:** Jordan 2024, https://kellerjordan.github.io/posts/muon
    """

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, max(steps // 40, 1), steps, 0.02 * peak
        )

    def matrices(tree: Any) -> Any:
        # Dim 0 numbers the blocks. By name, since the scales of norms are stacked to matrices too.
        inside = et.matching(r"(query|key|value|out|gate|up|down)\.weight$")(tree)
        dims = optax.contrib.MuonDimensionNumbers(1, 2)
        return jax.tree.map(lambda matrix: dims if matrix else None, inside)

    return optax.contrib.muon(
        schedule(learning_rate),
        weight_decay=0.1,
        adam_learning_rate=schedule(learning_rate / 2),
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )


def make_programs(args: argparse.Namespace) -> tuple[et.Program, et.Evaluation]:
    """The training step and the evaluation, on a mesh of all `AXES`."""
    mesh = et.mesh(**args.mesh)
    batch = P(("data", "fsdp"))
    tied = CONFIGS[args.config].tied
    placement = et.fsdp("fsdp", lazy="blocks", beside=tensor_parallel("model", tied=tied))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), make_optimizer(args.learning_rate, args.steps)
    )

    @et.donate
    @et.guard(nonfinite="skip")
    @et.update(optimizer)
    @et.shard(mesh, batch=batch, model=placement)
    @et.accumulate(args.accumulate)
    @et.precision(args.precision)
    def train_step(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model.nll(batch["tokens"], batch["labels"])), state, {}

    @et.evaluate
    @et.shard(mesh, batch=batch, model=placement)
    @et.precision(args.precision)
    def evaluate(model: Any, state: Any, batch: Any, key: Any) -> Any:
        nll = model.nll(batch["tokens"], batch["labels"])
        return et.mean(nll, where=batch["scored"] * batch["weight"][:, None]), state, {}

    return train_step, evaluate


def fit(
    args: argparse.Namespace,
    train: Int[np.ndarray, " train"],
    held_out: Int[np.ndarray, " held_out"],
    vocabulary: str,
    run: RunFolder,
) -> tuple[dict[str, Any], str]:
    """Trains, evaluates and samples; the figures of the run, and the text."""
    train_step, evaluate = make_programs(args)
    # A multiple of 16 rows, so that a mesh can split them; no text has the last ones.
    vocab_size = -(-len(vocabulary) // 16) * 16
    config = dataclasses.replace(CONFIGS[args.config], vocab_size=vocab_size)

    def make(key: Any) -> Any:
        return Llama(config, axis="model", sequence_parallel=args.sequence_parallel, key=key)

    def held_out_bits(ts: et.TrainState, source: et.data.RowSource) -> float:
        loader = et.data.Loader(source, args.batch_size, shuffle=False, epochs=1)
        batches = et.data.prefetch(loader, train_step.batch_sharding)
        merged = et.merge(*[evaluate(ts, batch) for batch in batches])
        return bits_per_character(et.fetch(merged)["loss"])

    scored = ScoredWindows(held_out, args.length)
    some = Every(scored, max(len(scored) // (8 * args.batch_size), 1))
    looks = {args.steps * part // 5 for part in range(1, 5)} - {0}
    seconds: dict[str, float] = {}
    looking = 0.0
    start = time.perf_counter()
    ts = train_step.init(make, key=jax.random.key(args.seed))
    jax.block_until_ready(ts.leaves)
    seconds["init_seconds"] = time.perf_counter() - start
    loader = et.data.Loader(
        Windows(train, args.length), args.batch_size, seed=args.seed, remainder="drop"
    )
    window: list[Any] = []
    logged: dict[str, float] = {}
    with et.data.prefetch(loader, train_step.batch_sharding) as batches:
        batch = next(batches)
        start = time.perf_counter()
        ts, metrics = train_step(ts, batch)
        jax.block_until_ready(ts.leaves)
        seconds["compile_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        for step in range(1, args.steps + 1):
            if step > 1:
                batch = next(batches)
                ts, metrics = train_step(ts, batch)
            window.append(metrics)
            if step % args.log_every == 0 or step == args.steps:
                logged = et.fetch(et.merge(*window))
                bits = bits_per_character(logged["loss"])
                run.write({"step": step, "train_bits": bits, "grad_norm": logged["grad_norm"]})
                run.show(step, f"{bits:.3f} bits a character")
                window.clear()
            if step in looks:
                begin = time.perf_counter()
                run.write({"step": step, "some_held_out_bits": held_out_bits(ts, some)})
                looking += time.perf_counter() - begin
        jax.block_until_ready(ts.leaves)
        train_seconds = time.perf_counter() - start - looking
    train_step.check(ts)
    begin = time.perf_counter()
    bits = held_out_bits(ts, scored)
    run.write({"step": args.steps, "held_out_bits": bits})
    seconds["evaluation_seconds"] = time.perf_counter() - begin
    inspection = train_step.inspect(ts, batch)
    rate = (args.steps - 1) / train_seconds
    figures = {
        "bits_per_character": bits,
        "train_bits_per_character": bits_per_character(logged["loss"]),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(ts.model)),
        "skipped_steps": int(ts.extra["guard"]["skipped"]),
        "steps_per_second": rate,
        "tokens_per_second": rate * args.batch_size * args.length,
        **seconds,
        "compilations": train_step.compilations,
        "collectives_per_step": sum(collective.times for collective in inspection.collectives),
        "collective_bytes_per_step": sum(
            collective.times * collective.bytes for collective in inspection.collectives
        ),
        "donated_bytes": inspection.donated_bytes,
    }
    # On one device: what was split comes together, and the same model runs without a collective.
    whole = jax.tree.map(jnp.asarray, jax.device_get(ts.model))
    prompt = held_out[: args.length // 4]
    drawn = sample(whole, jnp.asarray(prompt), jax.random.key(args.seed), args, len(vocabulary))
    return figures, "".join(vocabulary[number] for number in [*prompt, *np.asarray(drawn)])


def sample(
    model: Llama, prompt: Int[Array, " prompt"], key: Any, args: argparse.Namespace, known: int
) -> Int[Array, " sampled"]:
    """Draws `SAMPLED` tokens below `known` after the prompt, at temperature 0.8.

    Each is drawn from a pass over the last `args.length` tokens: there is no cache of keys and
    values, which would be worth it for larger models.
    """
    length = args.length

    @eqx.filter_jit
    def draw(model: Llama, window: Array, key: Array) -> Array:
        def one(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            # What stands behind the first `filled` tokens is padding, which they do not look at.
            window, filled = carry
            logits = model(window[None])[0, filled - 1, :known].astype(jnp.float32)
            token = jax.random.categorical(key, logits / 0.8).astype(window.dtype)
            full = filled == length
            window = jnp.where(full, jnp.roll(window, -1), window)
            window = window.at[jnp.where(full, length - 1, filled)].set(token)
            return (window, jnp.minimum(filled + 1, length)), token

        start = (window, jnp.asarray(prompt.size, jnp.int32))
        return jax.lax.scan(one, start, jax.random.split(key, SAMPLED))[1]

    return draw(model, jnp.zeros(length, prompt.dtype).at[: prompt.size].set(prompt), key)


def read_texts(args: argparse.Namespace) -> tuple[str, str]:
    """The text to train on, and the one held out."""
    if args.text is None:
        return datasets.shakespeare()
    text = args.text.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def main() -> None:
    args = arguments()
    make_cpu_devices(math.prod(args.mesh.values()))
    started = time.perf_counter()
    console = Console()
    name = args.text.stem if args.text else "shakespeare"
    run = RunFolder(name, args.run, console)
    texts = read_texts(args)
    vocabulary = "".join(sorted(set("".join(texts))))
    train, held_out = (encode(text, vocabulary) for text in texts)

    with run.steps(args.steps):
        figures, drawn = fit(args, train, held_out, vocabulary, run)

    figures["total_seconds"] = time.perf_counter() - started
    figures["processor_seconds"] = time.process_time()
    plot(run.lines, figures, name, run.path / "curves.png")
    (run.path / "sample.txt").write_text(drawn, encoding="utf-8")
    console.print(Text(drawn))
    console.print(table(figures, args, name))
    console.print(f"The run is in {run.path}/: metrics.jsonl, curves.png, sample.txt")
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "text")}
    settings["text"] = name
    print(json.dumps({"benchmark": "train_llama", **figures, **settings, **environment()}))


def table(figures: dict[str, Any], args: argparse.Namespace, name: str) -> Table:
    mesh = ", ".join(f"{axis} {size}" for axis, size in args.mesh.items())
    grid = Table(
        title=f"Llama `{args.config}` on {name}: {mesh}, {args.accumulate} microbatches, "
        f"{args.precision}",
        title_justify="left",
        show_header=False,
    )
    for label, value in (
        ("bits per character, held out", f"{figures['bits_per_character']:.3f}"),
        ("the same, training", f"{figures['train_bits_per_character']:.3f}"),
        ("parameters", f"{figures['parameters']:,}"),
        ("steps/s", f"{figures['steps_per_second']:.1f}"),
        ("tokens/s", f"{figures['tokens_per_second']:,.0f}"),
        ("compile time", f"{figures['compile_seconds']:.1f} s"),
        ("compilations", f"{figures['compilations']}"),
        ("collectives a step", f"{figures['collectives_per_step']}"),
        ("bytes of those", f"{figures['collective_bytes_per_step']:,}"),
        ("skipped steps", f"{figures['skipped_steps']}"),
        ("whole run", f"{figures['total_seconds']:.1f} s"),
        ("of processor time", f"{figures['processor_seconds']:.1f} s"),
    ):
        grid.add_row(label, value)
    return grid


def plot(lines: list[dict[str, Any]], figures: dict[str, Any], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (
        ("train_bits", "training", "-"),
        ("some_held_out_bits", "held out, a part of it", "o"),
    ):
        found = [line for line in lines if key in line]
        axes.plot(
            [line["step"] for line in found], [line[key] for line in found], style, label=label
        )
    axes.axhline(
        figures["bits_per_character"],
        color="C1",
        linestyle="--",
        label=f"held out, at the end: {figures['bits_per_character']:.3f}",
    )
    axes.set(xlabel="step", ylabel="bits per character", title=name)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
