"""Claim: `import eqtrain` costs at most 0.1 s more than the libraries it stands on.

Each round starts two fresh interpreters in turn, one that imports jax, equinox and optax, one that
imports eqtrain (and so those too), and the result is the median over rounds of each. The order
within a round alternates, so that a machine that warms up or slows down favours neither.

    python benchmarks/import_time.py

Needs no extra. About half a minute on two cores. The last line is JSON; `added_seconds` <= 0.1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import environment

BASE = "import jax, equinox, optax"
OURS = "import eqtrain"
LIMIT_SECONDS = 0.1


def import_seconds(statement: str) -> float:
    """Measures `statement` alone in a fresh interpreter, without the interpreter's own start."""
    script = (
        f"import time; start = time.perf_counter()\n{statement}\nprint(time.perf_counter() - start)"
    )
    root = Path(__file__).resolve().parent.parent
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for statement in (BASE, OURS):  # Writes the bytecode and fills the disk cache.
        import_seconds(statement)
    seconds: dict[str, list[float]] = {BASE: [], OURS: []}
    differences = []
    for index in range(rounds):
        for statement in (BASE, OURS) if index % 2 == 0 else (OURS, BASE):
            seconds[statement].append(import_seconds(statement))
        differences.append(seconds[OURS][-1] - seconds[BASE][-1])
        print(f"{index + 1:3d}/{rounds}  {seconds[BASE][-1]:.3f} s  {seconds[OURS][-1]:.3f} s")
    added = statistics.median(differences)
    result = {
        "benchmark": "import_time",
        "base_seconds": round(statistics.median(seconds[BASE]), 4),
        "eqtrain_seconds": round(statistics.median(seconds[OURS]), 4),
        "added_seconds": round(added, 4),
        "within_limit": added <= LIMIT_SECONDS,
        "rounds": rounds,
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
