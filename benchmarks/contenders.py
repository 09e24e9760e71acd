"""What drivers that compare whole training steps share: contenders in turn, and their table."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.workers import Worker

HERE = Path(__file__).resolve().parent
COMPARED = 3
# For every contender alike. Huge pages: see docs/performance.md.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Contender:
    """A process that takes steps of one size, and what it needed for them.

    `command` is a script of `peers/`, which calls `peers.served.serve`, and its arguments. Every
    one has the same environment.
    """

    def __init__(self, name: str, command: list[str], log: Path):
        self.name = name
        self.step_ms: list[float] = []
        self.ready_seconds = 0.0
        self.peak_bytes = 0
        script = str(HERE / "peers" / command[0])
        self._worker = Worker([script, *command[1:]], log, ENVIRONMENT)

    def ask(self, do: str, stepper: str = "step", **request: Any) -> dict[str, Any]:
        self._worker.send(do=do, name=stepper, **request)
        return self._worker.receive()

    def make(self, batch: dict[str, Any], **options: Any) -> float:
        """Makes what is measured, and takes its first step; the loss of that."""
        made = self.ask("make", batch=batch, options=options)
        self.ready_seconds = made["seconds"]
        return made["loss"]

    def measure(self, steps: int) -> None:
        self.step_ms.append(self.ask("run", steps=steps)["seconds"] * 1000 / steps)

    def first_losses(self, batch: dict[str, Any], **options: Any) -> list[float]:
        """Of a stepper made for this alone."""
        made = self.ask("make", "check", batch=batch, options=options)
        more = [self.ask("run", "check", steps=1)["loss"] for _ in range(COMPARED - 1)]
        self.ask("drop", "check")
        return [made["loss"], *more]

    def close(self) -> None:
        self._worker.close()


def measure(contenders: list[Contender], rounds: int, steps: int) -> None:
    """Goes through all of them in every round, in an order drawn anew; their peaks at the end.

    One step of each turn is not counted: training does not stand still between steps, and the first
    after a pause can take two thirds as long again.
    """
    order, shuffle = list(contenders), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for contender in order:
            contender.ask("run", steps=1)
            contender.measure(steps)
    for contender in contenders:
        contender.peak_bytes = contender.ask("memory")["bytes"]


def cells_of(line: dict[str, Any], others: tuple[str, ...]) -> list[str]:
    """The cells of a contender's step, of its ratios to others, and of what it needed."""
    step, ratios = line["step_ms"], [line.get(f"over_{other}") for other in others]
    return [
        f"{step['median']:.0f}",
        f"{step['q1']:.0f} - {step['q3']:.0f}",
        *(
            f"{ratio['median']:.2f} ({ratio['q1']:.2f} - {ratio['q3']:.2f})" if ratio else ""
            for ratio in ratios
        ),
        f"{line['ready_seconds']:.1f}",
        f"{line['peak_bytes'] / 1e9:.2f}",
    ]


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [header, *rows]:
            print(" | ".join(row))
        return
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A table that is written to a file must not be folded to the width of a terminal.
    (console if console.is_terminal else Console(width=160)).print(table)
