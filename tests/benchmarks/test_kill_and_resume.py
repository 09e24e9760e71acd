"""Runs that are killed by SIGKILL and resumed, and what would show that one went wrong."""

import json
from pathlib import Path

import pytest

from benchmarks.kill_and_resume import Run, measure

pytest.importorskip("orbax.checkpoint")


def test_a_run_that_is_killed_anywhere_ends_as_one_that_never_was(tmp_path):
    found = measure(tmp_path, kills=12, steps=60, seconds=150)
    assert found["equal"], found["differences"]
    assert found["bytes_lost"] == 0
    # Else nothing was tried: 12 kills, or as many as a busy machine managed in the time.
    assert found["kills"] >= 4 and found["resumes"] >= 2 and found["in_a_save"] >= 1, found
    assert len(Run.read(tmp_path / "alone.jsonl").steps) == 60


def log(path: Path, *lines: object) -> Run:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run.read(path)


def step(number: int, loss: str = "0x1", ids: tuple[int, ...] = (1, 2)) -> dict[str, object]:
    return {"step": number, "loss": loss, "ids": list(ids)}


def test_what_is_not_equal_is_found(tmp_path):
    path = tmp_path / "log.jsonl"
    end = {"end": {"model": "abc"}}
    alone = log(path, {"start": 0}, step(1), step(2), end)
    redone = log(path, {"start": 0}, step(1), step(2), {"start": 1}, step(2), end)
    assert redone.differences(alone) == [] and redone.redone == 1
    assert log(path, step(1), step(2, ids=(2, 1)), end).differences(alone) != []
    assert log(path, step(1), step(2, loss="0x2"), end).differences(alone) != []
    assert log(path, step(1), end).differences(alone) != []
    assert log(path, step(1), step(2), {"end": {"model": "abd"}}).differences(alone) == ["model"]
    with pytest.raises(ValueError, match="Got step 2 as"):
        log(path, step(1), step(2), {"start": 1}, step(2, ids=(3, 4)))
