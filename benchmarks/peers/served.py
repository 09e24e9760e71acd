"""How a contender of `benchmarks/contenders.py` answers: a JSON line for each request.

No framework is imported here, so that a process holds its own alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.memory import peak_bytes

# Takes so many steps and waits for them; the loss of the last one.
Stepper = Callable[[int], float]


def serve(make_batch: Callable[..., Any], make_stepper: Callable[..., Stepper]) -> None:
    """Serves requests from standard input until it ends.

    A request says under `batch` what `make_batch` is called with, by name, and under `options` what
    `make_stepper` is called with beside that batch. Both count as preparation, and so does the
    first step, which compiles.
    """
    steppers: dict[str, Stepper] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, reply = request["name"], {}
        start = time.perf_counter()
        if request["do"] == "make":
            batch = make_batch(**request["batch"])
            steppers[name] = make_stepper(batch, **request["options"])
            loss = steppers[name](1)
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        elif request["do"] == "run":
            loss = steppers[name](request["steps"])
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        elif request["do"] == "drop":
            del steppers[name]
        elif request["do"] == "memory":
            reply = {"bytes": peak_bytes()}
        print(json.dumps(reply), flush=True)
