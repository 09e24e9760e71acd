"""Runs the tests of bits and of roundings as XLA compiles by default, in a process of their own.

The other tests are compiled in a quicker way where there is one, see `conftest.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BY_DEFAULT, QUICK_CODEGEN

FILES = ["tests/test_equivalence_precision.py", "tests/sharding/test_ordered.py"]

pytestmark = pytest.mark.skipif(not QUICK_CODEGEN, reason="Every test is compiled by default.")


def run(choice: str) -> str:
    flags = {"XLA_FLAGS": "", BY_DEFAULT: "1"}
    command = f"-m pytest -q -n0 -p no:cacheprovider {' '.join(FILES)} -m".split()
    done = subprocess.run(
        [sys.executable, *command, choice],
        cwd=Path(__file__).parent.parent,
        env=os.environ | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def number_passed(output: str) -> int:
    match = re.search(r"(\d+) passed", output)
    return int(match.group(1)) if match else 0


def test_bits_and_roundings_of_the_default_tier():
    assert number_passed(run("codegen and not grid")) >= 12


@pytest.mark.grid
def test_bits_and_roundings_of_the_grid():
    assert number_passed(run("codegen and grid")) >= 30


def test_every_test_that_is_marked_is_in_those_files():
    root = Path(__file__).parent
    marked = [
        path.relative_to(root.parent).as_posix()
        for path in sorted(root.rglob("test_*.py"))
        if "pytest.mark." + "codegen" in path.read_text(encoding="utf-8")
    ]
    assert sorted(marked) == sorted(FILES)
