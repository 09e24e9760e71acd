"""The command `eqtrain`: what it prints, and its one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eqtrain as et
from eqtrain._cli import UsageError, load, main
from eqtrain.bundles.bundle import save_bundle

ROOT = Path(et.__file__).parents[1]
TRAIN = """
import equinox as eqx, jax, jax.numpy as jnp, optax
import eqtrain as et

class Model(eqx.Module):
    w: jax.Array
    offset: jax.Array
    power: int

def make(key, power=2):
    return Model(jnp.arange(1.0, 4.0), jnp.zeros(()), power)

def narrow(key):
    return Model(jnp.zeros(2), jnp.zeros(()), 2)

def loss(model, state, batch, key):
    noise = jax.vmap(jax.random.normal)(key)
    out = (batch["x"] @ model.w) ** model.power + model.offset + 0.0 * noise
    fine = et.mean(jnp.log(batch["y"]) * out, where=batch["weight"])
    return fine + 2.0 * et.mean(model.offset * batch["x"].sum(1)), state, {}

step = et.pipe(loss, et.accumulate(2), et.update(optax.adam(0.1)), et.guard, et.donate)
many = et.pipe(loss, et.update(optax.adam(0.1)), et.repeat(2), et.donate)
settings = {"rate": 0.1}

class Nested:
    loss = staticmethod(loss)
"""


def batch_of(y: Any) -> dict[str, Any]:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    return {"x": x, "y": np.array(y, np.float32), "weight": np.array([1, 1, 1, 0], np.float32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user trains: a module and three bundles of its steps."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "train_of_user.py").write_text(TRAIN)
    (folder / "train_that_fails.py").write_text("import jax\njax.nothing\n")
    (folder / "train_that_lacks.py").write_text("import nothing_like_that\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import train_of_user as train  # pyright: ignore[reportMissingImports]
    ts = train.step.init(train.make, key=jax.random.key(0))
    for name, y in {"good": [1, 2, 3, 4], "bad": [1, -2, 0, 4]}.items():
        save_bundle(folder / name, ts, batch_of(y), program=train.step, reason={"loss": np.nan})
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), batch_of([1, 2, 3, 4]))
    ts = train.many.init(train.make, key=jax.random.key(0))
    save_bundle(folder / "stacked", ts, stacked, program=train.many, reason={})
    return folder


@pytest.fixture
def user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    return folder


def explain(*arguments: str, make: str = "train_of_user:make") -> int:
    return main(["explain", *arguments, "--make", make])


def test_the_installed_command_explains_a_bundle(folder: Path):
    # What pip makes of `[project.scripts]`.
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["eqtrain"].split(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    result = subprocess.run(
        [sys.executable, "-c", script, "explain", "bad"]
        + ["--loss", "train_of_user:step", "--make", "train_of_user:make"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "step 0 of et.pipe(loss, et.accumulate(2), " in result.stdout
    assert "saved in bad: loss nan" in result.stdout
    # The logarithm of the second row is NaN, and -inf of the third, which is none.
    assert "The first NaN is of `log` (batch.y), in the forward pass" in result.stdout
    line = 1 + TRAIN.splitlines().index(
        '    fine = et.mean(jnp.log(batch["y"]) * out, where=batch["weight"])'
    )
    assert f"train_of_user.py:{line} in loss" in result.stdout
    assert "rows of the global batch to blame: 1\n" in result.stdout


@pytest.mark.parametrize("name", ["loss", "step", "Nested.loss"])
def test_the_loss_is_that_of_the_step(user: Path, capsys: Any, name: str):
    assert explain("good", "--loss", f"train_of_user:{name}") == 0
    batch = batch_of([1, 2, 3, 4])
    expected = np.mean(np.log(batch["y"][:3]) * (batch["x"][:3] @ [1, 2, 3]) ** 2)
    out = capsys.readouterr().out.splitlines()
    said = out[-1].split("the loss is ")[1].split(",")[0]
    assert np.isclose(float(said), expected, rtol=1e-5)
    assert out[-2].startswith("Nothing went wrong")
    # Negative control: the padded row would change it.
    assert not np.isclose(expected, np.mean(np.log(batch["y"]) * (batch["x"] @ [1, 2, 3]) ** 2))


def test_what_was_given_and_is_not_finite_is_named(user: Path, tmp_path: Path, capsys: Any):
    import train_of_user as train  # pyright: ignore[reportMissingImports]

    ts = train.step.init(train.make, key=jax.random.key(0))
    w = np.array([1, np.inf, np.nan], np.float32)
    ts = ts.replace(model=train.Model(w, ts.model.offset, 2))
    batch = batch_of([1, 2, 3, np.nan])
    path = save_bundle(tmp_path / "b", ts, batch, program=train.step, reason={})
    assert explain(str(path), "--loss", "train_of_user:loss") == 0
    out = capsys.readouterr().out
    assert "was passed in (model.w)" in out
    assert "also: the first NaN was passed in (batch.y)" in out


def test_another_setting_is_told(user: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    import train_of_user as train  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(train, "cubed", lambda key: train.make(key, power=3), raising=False)
    assert explain("good", "--loss", "train_of_user:loss", make="train_of_user:cubed") == 0
    assert "note: `model.power` was 2, and is 3.\n" in capsys.readouterr().out


# The arguments, and what the one line of the error has.
WRONG: dict[str, tuple[list[str], str, str]] = {
    "no bundle": (["nowhere", "--loss", "train_of_user:loss"], "", "Got nowhere, no folder"),
    "a file": (["train_of_user.py", "--loss", "train_of_user:loss"], "", "no folder"),
    "no index": ([".", "--loss", "train_of_user:loss"], "", "a folder without `bundle.json`"),
    "no colon": (["good", "--loss", "train_of_user"], "", "`--loss` takes module:name"),
    "no module": (["good", "--loss", "trian:loss"], "", "which is neither in "),
    "a module that fails": (
        ["good", "--loss", "train_that_fails:loss"],
        "",
        "which raised AttributeError: module 'jax' has no attribute 'nothing'",
    ),
    "a module that lacks one": (
        ["good", "--loss", "train_that_lacks:loss"],
        "",
        "which raised ModuleNotFoundError: No module named 'nothing_like_that'",
    ),
    "no name": (["good", "--loss", "train_of_user:lots"], "", "Got 'lots', which 'train_of_user'"),
    "no function": (["good", "--loss", "train_of_user:settings"], "", "which is dict"),
    "make takes more": (["good", "--loss", "train_of_user:loss"], "train_of_user:loss", "a key"),
    "no make": (["good", "--loss", "train_of_user:loss"], "train_of_user:made", "`--make` takes"),
    "another model": (
        ["good", "--loss", "train_of_user:loss"],
        "train_of_user:narrow",
        "`model.w` is float32[3] in the bundle and float32[2] in the program",
    ),
    "several steps": (["stacked", "--loss", "train_of_user:many"], "", "that of 2 steps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_one_line_and_status_2(user: Path, capsys: Any, case: str):
    arguments, make, expected = WRONG[case]
    assert explain(*arguments, make=make or "train_of_user:make") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("eqtrain explain: ") and expected in err


def test_missing_arguments_are_told_with_the_usage(capsys: Any):
    with pytest.raises(SystemExit) as left:
        main(["explain", "good"])
    assert left.value.code == 2 and "required: --loss, --make" in capsys.readouterr().err


def test_an_error_of_the_loss_itself_keeps_its_traceback(user: Path):
    # It is the user's own to find: its file and line are what helps.
    with pytest.raises(TypeError, match="4 were given"):
        explain("good", "--loss", "train_of_user:make")


def test_a_name_may_have_dots_and_the_current_folder_is_looked_in(user: Path):
    assert str(user) not in sys.path
    assert load("train_of_user:Nested.loss", "--loss").__name__ == "loss"
    assert str(user) in sys.path
    with pytest.raises(UsageError, match="Got 'Nested.lots'"):
        load("train_of_user:Nested.lots", "--loss")
