"""Runs what docs/data.md shows, as it stands there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import eqtrain as et

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_code_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    names = {"et": et, "jax": jax, "jnp": jnp, "np": np}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, "docs/data.md", "exec"), names)
    assert "padding" in capsys.readouterr().out


def test_page_names_all_that_is_public():
    for name in vars(et.data):
        value = getattr(et.data, name)
        if name[0] != "_" and callable(value) and not isinstance(value, type):
            assert re.search(rf"\b{name}\b", PAGE), name
