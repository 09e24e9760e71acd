"""Runs what docs/checkpoints.md shows, in the order in which it stands there."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "checkpoints"}
    # As a reader's session is: promotion is JAX's own.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, "checkpoints.md", "exec"), names)
    return names


def test_what_the_page_shows_runs_and_goes_on_when_it_is_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 3
    names = run(BLOCKS)
    # 60 rows in batches of 8 are 8 steps an epoch; of 32 steps, 30 is the last that is saved.
    assert (names["step"], names["position"]) == (30, 3 * 60 + 6 * 8)
    assert names["found"].chain[-1] == "et.donate"
    np.testing.assert_array_equal(np.asarray(names["model"]["w"]), np.asarray(names["ts"].ema["w"]))
    first = run(BLOCKS[:1])
    assert int(first["ts"].step) == 32 and first["n"] == 2  # from step 30 to the end
