"""Runs what README.md and the pages that it sends a reader to show, as it stands there."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqtrain as et
from tests.tiers import grid

ROOT = Path(__file__).parent.parent


def example(name: str, page: str = "README.md") -> str:
    """The code block of a page after `<!-- example: name -->`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert match is not None, f"{page} has no example {name!r}"
    return match.group(1)


PIPELINE = functools.partial(example, "pipeline", "docs/transforms.md")


def test_the_readme_is_short_and_begins_with_what_needs_the_package_alone():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170
    assert text.index("<!-- example: before -->") < text.index("<!-- quickstart-command -->")
    linked = re.findall(r"\]\(((?:docs|examples)/[\w./-]+)", text)
    assert {link for link in linked if not (ROOT / link).is_file()} == set()
    # Every page is reached from here.
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages <= set(linked)


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
    names = run(example("decorators"))
    steps = 20 * names["loader"].steps_per_epoch
    assert int(names["ts"].step) == steps
    assert names["train_step"].compilations == 1
    assert et.fetch(names["metrics"])["accuracy"] > 0.8  # chance is 0.25
    assert "all-reduce" in capsys.readouterr().out


def test_the_pipeline_form_trains_and_evaluates():
    names = run(PIPELINE())
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
    code = PIPELINE()
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


def test_the_contrastive_loss_is_that_of_one_device():
    names = run(example("contrastive", "docs/losses.md"))
    one, four = (names["grads"][devices] for devices in (1, 4))
    for name in ("image", "text"):
        np.testing.assert_allclose(four[name], one[name], rtol=1e-5, atol=1e-6)
    # By hand, in float64, from what the page begins with.
    model = {name: np.asarray(leaf, np.float64) for name, leaf in names["make"](None).items()}
    image, text = (np.asarray(names["batch"][name], np.float64) for name in ("image", "text"))
    logits = (image @ model["image"]) @ (text @ model["text"]).T
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    d_image = image.T @ ((share - np.eye(8)) @ (text @ model["text"])) / 8
    np.testing.assert_allclose(one["image"], d_image, rtol=1e-4, atol=1e-6)
