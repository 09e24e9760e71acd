"""Runs what docs/data.md shows, as it stands there."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import eqtrain as et
from tests.pages import blocks_of, run, text_of


def test_code_of_the_page_runs(capsys):
    blocks = blocks_of("data.md")
    assert len(blocks) == 7
    run("data.md", blocks, {"et": et, "jax": jax, "jnp": jnp, "np": np})
    assert "padding" in capsys.readouterr().out


def test_page_names_all_that_is_public():
    for name in vars(et.data):
        value = getattr(et.data, name)
        if name[0] != "_" and callable(value) and not isinstance(value, type):
            assert re.search(rf"\b{name}\b", text_of("data.md")), name
