"""How a contender of `benchmarks/compare_bert.py` answers: a JSON line for each request.

No framework is imported here, so that a process holds its own alone.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

# Takes so many steps and waits for them; the loss of the last one.
Stepper = Callable[[int], float]


def serve(make: Callable[[dict[str, Any], float], Stepper]) -> None:
    """Serves requests from standard input until it ends.

    `make(batch, dropout)` gives a Stepper for `bert_data.made_up_batch` of the size asked for; what
    it does counts as preparation, and so does the first step, which compiles.
    """
    from benchmarks import bert_data

    steppers: dict[str, Stepper] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, reply = request["name"], {}
        start = time.perf_counter()
        if request["do"] == "make":
            batch = bert_data.made_up_batch(request["rows"], request["length"])
            steppers[name] = make(batch, request["dropout"])
            loss = steppers[name](1)
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        elif request["do"] == "run":
            loss = steppers[name](request["steps"])
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        elif request["do"] == "drop":
            del steppers[name]
        elif request["do"] == "memory":
            reply = {"bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        print(json.dumps(reply), flush=True)
