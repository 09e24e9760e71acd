"""The benchmark that trains a Llama: what it reads, what it reports, and the same on any mesh."""

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqtrain as et
from benchmarks import train_llama
from benchmarks.train_llama import Every, ScoredWindows, Windows, bits_per_character, parse_mesh
from models.llama import Llama

ROOT = Path(__file__).parent.parent.parent
WORDS = "the cat sat on a mat and so did I.\n".split(" ")


def text(words: int) -> str:
    rng = random.Random(0)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def settings(**changed: Any) -> argparse.Namespace:
    given = {
        "mesh": parse_mesh("data=1"),
        "config": "LLAMA_TINY",
        "steps": 3,
        "batch_size": 8,
        "length": 16,
        "accumulate": 1,
        "precision": "float32",
        "sequence_parallel": False,
        "learning_rate": 0.02,
        "seed": 0,
    }
    return argparse.Namespace(**{**given, **changed})


def test_windows_are_the_text_and_the_text_one_further():
    windows = Windows(np.arange(10, dtype=np.int32), 4)
    assert len(windows) == 6
    for start in range(6):
        row = windows[start]
        assert row["tokens"].tolist() == list(range(start, start + 4))
        assert row["labels"].tolist() == list(range(start + 1, start + 5))


@pytest.mark.parametrize("size", [5, 6, 8, 9, 23, 64])
@pytest.mark.parametrize("length", [1, 4])
def test_scored_windows_score_each_character_but_the_first_once(size: int, length: int):
    rows = ScoredWindows(np.arange(size, dtype=np.int32), length)
    scored: list[int] = []
    for index in range(len(rows)):
        row = rows[index]
        for place, label in enumerate(row["labels"].tolist()):
            if row["scored"][place]:
                scored.append(label)
                # Half a length of text before it, where there is that.
                assert place + 1 >= min(label, length // 2)
    assert scored == list(range(1, size))


def test_every_takes_each_nth_row():
    rows = Every(Windows(np.arange(10, dtype=np.int32), 3), 3)  # which has 7
    assert [int(rows[index]["tokens"][0]) for index in range(len(rows))] == [0, 3, 6]


def test_text_shorter_than_a_window_raises():
    with pytest.raises(ValueError, match=r"longer than its windows\. Got 4 characters"):
        Windows(np.arange(4, dtype=np.int32), 4)


def test_encode_is_undone_by_the_vocabulary_and_refuses_what_is_not_in_it():
    numbers = train_llama.encode("cabbage", "abceg")
    assert "".join("abceg"[number] for number in numbers) == "cabbage"
    with pytest.raises(ValueError, match=r"\['x'\]"):
        train_llama.encode("box", "bo")


def test_mesh_is_read_with_the_axes_that_are_left_out():
    assert parse_mesh("data=2, model=4") == {"data": 2, "fsdp": 1, "model": 4}


@pytest.mark.parametrize("given", ["", "2", "data", "data=0", "data=-1", "rows=2", "data=2,data=2"])
def test_mesh_that_is_none_raises(given: str):
    with pytest.raises(argparse.ArgumentTypeError, match="sizes of some of data, fsdp, model"):
        parse_mesh(given)


def test_bits_of_a_model_that_knows_nothing_are_those_of_its_vocabulary():
    # All logits are 0, so each character costs log2 of the vocabulary, however windows overlap and
    # although the last batch is padded.
    args = settings()
    train_step, evaluate = train_llama.make_programs(args)
    config = train_llama.CONFIGS["LLAMA_TINY"]

    def make(key: Any) -> Any:
        return jax.tree.map(lambda leaf: 0 * leaf, Llama(config, key=key))

    ts = train_step.init(make, key=jax.random.key(0))
    rows = ScoredWindows(np.arange(150, dtype=np.int32) % config.vocab_size, args.length)
    loader = et.data.Loader(rows, args.batch_size, shuffle=False, epochs=1)
    merged = et.merge(*[evaluate(ts, batch) for batch in loader])
    assert merged["loss"].count == 149
    bits = bits_per_character(et.fetch(merged)["loss"])
    np.testing.assert_allclose(bits, math.log2(config.vocab_size), rtol=1e-6)


def losses(args: argparse.Namespace, seeds: tuple[int, ...]) -> list[list[float]]:
    """Of four steps, for each seed of the parameters and of the batches."""
    train_step, _ = train_llama.make_programs(args)
    config = train_llama.CONFIGS[args.config]
    tokens = np.random.default_rng(0).integers(0, 20, 1000, dtype=np.int32)

    def run(seed: int) -> list[float]:
        ts = train_step.init(
            lambda key: Llama(config, sequence_parallel=args.sequence_parallel, key=key),
            key=jax.random.key(seed),
        )
        loader = et.data.Loader(Windows(tokens, args.length), args.batch_size, seed=seed)
        found = []
        for n in range(4):
            ts, metrics = train_step(ts, loader.batch(n))
            found.append(float(et.fetch(metrics)["loss"]))
        return found

    return [run(seed) for seed in seeds]


@pytest.mark.grid
def test_steps_are_the_same_on_any_mesh():
    expected, other = losses(settings(), (0, 1))
    mesh = parse_mesh("data=2,fsdp=2,model=2")
    [split] = losses(settings(mesh=mesh, sequence_parallel=True), (0,))
    # The first step has rate 0, so that two of the losses are of parameters that moved.
    np.testing.assert_allclose(split, expected, rtol=1e-4)
    assert abs(split[2] - split[0]) > 1e-3
    assert not np.allclose(other, expected, rtol=1e-4)


def test_script_trains_on_a_mesh_and_ends_with_a_line_of_json(tmp_path: Path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    (tmp_path / "some.txt").write_text(text(600), encoding="utf-8")
    options = (
        "--mesh data=2,fsdp=2,model=2 --config LLAMA_TINY --steps 3 --batch-size 8 --length 16 "
        "--log-every 1"
    )
    result = subprocess.run(
        [
            *(sys.executable, "benchmarks/train_llama.py", *options.split()),
            *("--text", str(tmp_path / "some.txt"), "--run", str(tmp_path / "run")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert [row.split("  ")[0] for row in printed[:3]] == [f"some {step}/3" for step in (1, 2, 3)]
    line = json.loads(printed[-1])
    assert line["benchmark"] == "train_llama"
    assert line["mesh"] == {"data": 2, "fsdp": 2, "model": 2}
    assert 1 < line["bits_per_character"] < math.log2(32)  # 16 rows of the vocabulary, and more
    assert line["compilations"] == 1
    assert line["skipped_steps"] == 0
    assert line["collectives_per_step"] > 0
    assert line["collective_bytes_per_step"] > 0
    for name in ("steps_per_second", "tokens_per_second", "compile_seconds"):
        assert line[name] > 0
    written = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written if "train_bits" in row] == [1, 2, 3]
    assert written[-1]["held_out_bits"] == line["bits_per_character"]
    assert (tmp_path / "run/curves.png").stat().st_size > 0
    assert len((tmp_path / "run/sample.txt").read_text(encoding="utf-8")) > train_llama.SAMPLED
