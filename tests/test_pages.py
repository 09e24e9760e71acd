"""What docs/internals.md and docs/extending.md say is so, and the example of a loop runs."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import blocks_of, run, text_of
from tests.test_doors import PACKAGE, STOREYS


def test_internals_draws_the_rooms_that_the_doors_are_tested_by():
    match = re.search(r"<!-- storeys -->\n```text\n(.*?)```", text_of("internals.md"), re.DOTALL)
    assert match is not None
    drawn = [line.split() for line in match.group(1).splitlines()]
    assert drawn[::-1] == STOREYS
    table = re.findall(r"^\| (`.*?`) \|", text_of("internals.md"), re.MULTILINE)
    named = [name for row in table for name in re.findall(r"`([\w]+)`", row)]
    assert set(named) >= {room for rooms in STOREYS for room in rooms} - {"_preemption", "_cli"}


def test_internals_names_files_and_functions_that_are_there():
    text = text_of("internals.md")
    files = set(re.findall(r"`([\w/]+\.py)`", text)) - {
        "internals.py",
        "tests/test_doors.py",
        "eqtrain/__init__.py",
    }
    assert len(files) > 20
    # Some are named without their room, behind one that has it.
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {file for file in files if not any(one.endswith(file) for one in found)} == set()
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    functions = re.findall(r"`(_?[a-z]\w+)`(?: gathers| divides|, which)", text)
    for name in [*functions, "_step_of_leaves", "_as_seen", "differentiate", "run_loss", "_after"]:
        assert re.search(rf"def {name}\(", code), name


@functools.cache
def extending() -> dict[str, Any]:
    return run("extending.md", blocks_of("extending.md"))


RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 8)).astype(np.float32),
    "label": np.eye(3, dtype=np.float32)[RNG.integers(0, 3, 8)],
    "weight": np.array([1, 2, 0, 1, 3, 1, 0, 1], np.float32),
}
MODEL = RNG.normal(size=(8, 3)).astype(np.float32) * 0.3


def gradient_by_hand(share: float = 0.0) -> np.ndarray:
    x, label = BATCH["x"].astype(np.float64), BATCH["label"].astype(np.float64)
    label = (1 - share) * label + share / 3
    logits = x @ MODEL.astype(np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    weight = BATCH["weight"] / BATCH["weight"].sum()
    return x.T @ (weight[:, None] * (p - label))


def moved(name: str) -> np.ndarray:
    """How far SGD at rate 1 moves the model: against its gradient."""
    step = extending()[name]
    ts = step.init(lambda key: jnp.asarray(MODEL), key=jax.random.key(0))
    after, _ = step(ts, BATCH)
    return np.asarray(ts.model) - np.asarray(after.model)


def test_smoothed_labels_give_the_gradient_by_hand():
    np.testing.assert_allclose(moved("train_step"), gradient_by_hand(0.1), rtol=1e-4, atol=1e-6)
    assert np.abs(moved("train_step") - gradient_by_hand()).max() > 1e-3  # negative control


def test_centralised_gradients_see_whole_leaves():
    gradient = gradient_by_hand()
    expected = gradient - gradient.mean(0, keepdims=True)
    np.testing.assert_allclose(moved("centred_step"), expected, rtol=1e-4, atol=1e-6)


def test_placement_of_ones_own_places():
    step = extending()["by_rows_step"]
    eight = step.init_shapes(lambda key: jnp.zeros((8, 3)))
    six = step.init_shapes(lambda key: jnp.zeros((6, 3)))
    assert [tuple(ts.model.sharding.spec) for ts in (eight, six)] == [("data",), ()]


def test_spread_is_the_standard_deviation_of_all_rows():
    ts = extending()["train_step"].init(lambda key: jnp.asarray(MODEL), key=jax.random.key(0))
    size = np.abs(BATCH["x"].astype(np.float64) @ MODEL).max(-1)
    found = extending()["spread"](extending()["evaluate"](ts, BATCH))
    assert found == pytest.approx(size.std(), rel=1e-4)


def test_the_digits_of_the_example_are_learnt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("sklearn")
    # What the example sets for itself would be met by the processes of other tests.
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    from examples import digits

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tested = digits.main(steps=40)
    assert tested["accuracy"] > 0.5  # chance is 0.1
    assert "step 40: loss" in capsys.readouterr().out
