"""Runs what docs/checkpoints.md shows, in the order in which it stands there."""

import numpy as np
import pytest

from tests.pages import blocks_of, run

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")


def test_what_the_page_shows_runs_and_goes_on_when_it_is_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of("checkpoints.md")
    assert len(blocks) == 3
    names = run("checkpoints.md", blocks)
    # 60 rows in batches of 8 are 8 steps an epoch; of 32 steps, 30 is the last that is saved.
    assert (names["step"], names["position"]) == (30, 3 * 60 + 6 * 8)
    assert names["found"].chain[-1] == "et.donate"
    np.testing.assert_array_equal(np.asarray(names["model"]["w"]), np.asarray(names["ts"].ema["w"]))
    first = run("checkpoints.md", blocks[:1])
    assert int(first["ts"].step) == 32 and first["n"] == 2  # from step 30 to the end
