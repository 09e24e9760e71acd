"""Runs the code that a page of the documentation shows, as it stands there."""

import re
from pathlib import Path
from typing import Any

import jax

DOCS = Path(__file__).parent.parent / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


def run(page: str, blocks: list[str], names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs blocks one after the other, and returns the names that they leave."""
    names = {"__name__": "page", **(names or {})}
    # As a reader's session is: promotion is JAX's own.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    return names
