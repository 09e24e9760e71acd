"""Runs what README.md shows, as it stands there."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqtrain as et
from tests.tiers import grid

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    """The code block after `<!-- example: name -->`."""
    match = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert match is not None, f"README.md has no example {name!r}"
    return match.group(1)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    # As a reader's session is: promotion is JAX's own.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, "README.md", "exec"), names)
    return names


def patched(script: str, diff: str) -> tuple[str, int]:
    """`script` with the diff applied, and how many lines the diff adds."""
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    imports = [line for line in added if not line.startswith(" ")]
    (old,), (new,) = removed, [line for line in added if line.startswith(" ")]
    assert script.count(old) == 1
    return "\n".join([*imports, script.replace(old, new)]), len(added)


def test_the_decorator_form_trains(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("sklearn")
    names = run(example("decorators"))
    steps = 2 * names["loader"].steps_per_epoch
    assert int(names["ts"].step) == steps
    assert names["train_step"].compilations == 1
    assert et.fetch(names["metrics"])["accuracy"] > 0.5  # chance is 0.1
    assert "all-reduce" in capsys.readouterr().out


def test_the_pipeline_form_trains_and_evaluates():
    names = run(example("pipeline"))
    ts, source = names["ts"], names["source"]
    assert int(ts.step) == 10 * 16  # ten epochs of 1000 rows in batches of 64
    assert names["train_step"].compilations == 1
    # In float64, on all rows at once: the evaluation was in batches, the last of them padded.
    model = {name: np.asarray(leaf, np.float64) for name, leaf in ts.model.items()}
    hidden = np.maximum(source["x"].astype(np.float64) @ model["in"], 0)
    exact = ((hidden @ model["out"] - source["y"]) ** 2).mean()
    merged = et.merge(*names["parts"])
    assert merged["loss"].count == 1000
    np.testing.assert_allclose(et.fetch(merged)["loss"], exact, rtol=1e-4)
    assert exact < 0.25 * (source["y"] ** 2).mean()


@pytest.mark.parametrize("transform", [grid("accumulate"), "shard", grid("guard"), "repeat"])
def test_the_pipeline_works_without_a_transform(transform: str):
    changes = {rf"\n    et\.{transform}\(.*": "", r"epochs=10": "epochs=5"}
    if transform == "repeat":
        changes[r"et\.data\.stack\(loader, 5\)"] = "loader"
    code = example("pipeline")
    for pattern, replacement in changes.items():
        code, replaced = re.subn(pattern, replacement, code)
        assert replaced == 1
    names = run(code)
    assert int(names["ts"].step) == 5 * 16
    assert et.merge(*names["parts"])["loss"].count == 1000


def test_the_diff_shards_a_plain_script_with_the_same_result():
    plain = run(example("before"))
    script, lines = patched(example("before"), example("diff"))
    assert lines <= 3
    sharded = run(script)
    np.testing.assert_allclose(plain["value"], sharded["value"], rtol=1e-4)
    for a, b in zip(
        jax.tree.leaves(plain["opt_state"]), jax.tree.leaves(sharded["opt_state"]), strict=True
    ):
        # Twenty steps of Adam amplify the rounding of sums taken in another order.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    assert len(plain["value"].sharding.device_set) == 1
    assert len(sharded["value"].sharding.device_set) == len(jax.devices())
