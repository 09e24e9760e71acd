"""How a driver ends that compares contenders: with goals, and JSON lines."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from benchmarks.environment import environment


class Report:
    """Made when the driver starts: it tells how long that took, and how busy the machine was."""

    def __init__(self, benchmark: str):
        self._benchmark = benchmark
        self._started = time.perf_counter()
        self._load_before = os.getloadavg()[0]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def end(self, lines: list[dict[str, Any]], goals: dict[str, bool], **settings: Any) -> None:
        for goal, met in goals.items():
            print(f"{'met   ' if met else 'MISSED'} {goal}")
        for line in lines:
            print(json.dumps(line))
        final = {
            "benchmark": self._benchmark,
            "goals": goals,
            **settings,
            "load_average": [round(self._load_before, 2), round(os.getloadavg()[0], 2)],
            "seconds": round(self.seconds, 1),
            **environment(),
        }
        print(json.dumps(final))
