"""What is known of a fault, and how it is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._jaxpr.frames import Frame
from .._util.text import aligned
from .blame import Fault
from .rows import RowBlame
from .tensors import Indices, Statistics, Tensor

KINDS = {
    "nan": "the first NaN",
    "inf": "the first infinity",
    "index": "an index out of bounds",
    "division": "a division by zero",
}
# Where no primitive of the loss or its gradients is to blame.
WITHOUT_PRIMITIVE = {
    "check": "a check of the loss failed",
    "update": "the optimizer made parameters that are not finite of gradients that are",
    "norm": "the gradients are finite, and the sum of their squares is not",
    "nothing": "nothing went wrong",
}
COLUMNS = ("tensor", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a step went wrong.

    **Fields:**

    - `kind`, `primitive`, `direction`: as `Fault` has them. Where none of them is to blame, `kind`
      is `"check"`, `"update"`, `"norm"` or `"nothing"`.
    - `frames`: the user's code, the innermost call first; `file`, `line`, `function` and `code` are
      of that one, None where an argument was bad from the start.
    - `loops`: each loop around it, such as the scan over layers, and the step in it.
    - `inputs`, `outputs`: statistics of the tensors that went in and came out, on one device.
    - `indices`: those that are out of bounds.
    - `device`: its coordinates on the mesh; `num_devices` at which the same went wrong.
    - `microbatch`: its number.
    - `rows`: which rows of the global batch are to blame; None where it was not tried.
    - `others`: faults that this one does not explain, or that follow from it, a line each.
    - `notes`: what else there is to say, a line each.
    """

    kind: str
    primitive: str
    direction: str
    frames: tuple[Frame, ...] = ()
    loops: tuple[tuple[str, int], ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    indices: tuple[Indices, ...] = ()
    device: dict[str, int] = dataclasses.field(default_factory=dict)
    num_devices: int = 1
    microbatch: int | None = None
    rows: RowBlame | None = None
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def file(self) -> str | None:
        return self.frames[0].file if self.frames else None

    @property
    def line(self) -> int | None:
        return self.frames[0].line if self.frames else None

    @property
    def function(self) -> str | None:
        return self.frames[0].function if self.frames else None

    @property
    def code(self) -> str | None:
        return self.frames[0].code if self.frames else None

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of the leaves that went in, uncomputed."""
        named = self.outputs if self.primitive == "input" else self.inputs
        return tuple(dict.fromkeys(tensor.name for tensor in named if tensor.name))

    def __str__(self) -> str:
        rows = [COLUMNS, *(_cells(tensor, side) for side, tensor in self._tensors())]
        table = [f"  {line}" for line in aligned(rows)] if rows[1:] else []
        return "\n".join([*self._lines(), *table])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS)
        for side, tensor in self._tensors():
            table.add_row(*map(Text, _cells(tensor, side)))
        first, *lines = self._lines()
        parts = [Text(first, style="bold red"), *map(Text, lines)]
        return Group(*parts, table) if table.row_count else Group(*parts)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        ins = [(f"in {number}", tensor) for number, tensor in enumerate(self.inputs)]
        return ins + [(f"out {number}", tensor) for number, tensor in enumerate(self.outputs)]

    def _lines(self) -> list[str]:
        named = f" ({', '.join(self.leaves)})" if self.leaves else ""
        if self.kind in WITHOUT_PRIMITIVE:
            what = WITHOUT_PRIMITIVE[self.kind]
        elif self.primitive == "input":
            what = f"{KINDS[self.kind]} was passed in{named}"
        else:
            what = (
                f"{KINDS[self.kind]} is of `{self.primitive}`{named}, in the {self.direction} pass"
            )
        lines = [what[0].upper() + what[1:]]
        for number, frame in enumerate(self.frames):
            lines.append(f"  {'at' if number == 0 else 'from'} {frame}")
            lines += [f"      {frame.code}"] if frame.code else []
        lines += [f"  step {step} of the {loop} around it" for loop, step in self.loops]
        where = [f"{axis}={place}" for axis, place in self.device.items()]
        if where:
            more = f", and {self.num_devices - 1} more" if self.num_devices > 1 else ""
            lines.append(f"  on device {', '.join(where)}{more}")
        if self.microbatch is not None:
            lines.append(f"  in microbatch {self.microbatch}")
        lines += [
            f"  {bad.bad} indices out of bounds, {bad.minimum} to {bad.maximum}, "
            f"where 0 to {bad.largest} are allowed"
            for bad in self.indices
        ]
        lines += self._row_lines()
        lines += [f"  also: {other}" for other in self.others]
        return lines + [f"  {note}" for note in self.notes]

    def _row_lines(self) -> list[str]:
        if self.rows is None:
            return []
        lines = []
        if self.rows.rows:
            lines.append(f"  rows of the global batch to blame: {_list(self.rows.rows)}")
        lines += [f"  rows that fail only together: {_list(group)}" for group in self.rows.together]
        if not lines:
            lines.append("  no rows of the global batch are to blame")
        if not self.rows.complete:
            lines.append(f"  (the search stopped after {self.rows.calls} trials)")
        return lines


def describe(
    fault: Fault,
    statistics: Statistics | None = None,
    *,
    device: dict[str, int] | None = None,
    num_devices: int = 1,
    microbatch: int | None = None,
    rows: RowBlame | None = None,
    others: tuple[Fault, ...] = (),
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Puts together what is known of a fault; arguments as the fields of `Explanation`."""
    measured = statistics or Statistics()
    return Explanation(
        fault.kind,
        fault.site.primitive,
        fault.direction,
        fault.site.frames,
        tuple(zip(fault.site.loops, fault.iterations, strict=True)),
        measured.inputs,
        measured.outputs,
        measured.indices,
        device or {},
        num_devices,
        microbatch,
        rows,
        tuple(map(_summary, others)),
        notes,
    )


def render(explanation: Explanation) -> None:
    """Prints an explanation: as a table if `rich` is installed, else as plain text."""
    try:
        from rich.console import Console
    except ImportError:
        print(explanation)
    else:
        Console().print(explanation)


def _summary(fault: Fault) -> str:
    if fault.site.primitive == "input":
        names = [fault.name_of(operand.name) or "an input" for operand in fault.site.outputs]
        return f"{KINDS[fault.kind]} was passed in ({', '.join(names)})"
    where = f" at {fault.site.frames[0]}" if fault.site.frames else ""
    return f"{KINDS[fault.kind]} of `{fault.site.primitive}`{where} ({fault.direction})"


def _list(rows: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, rows[:20]))
    return f"{shown} and {len(rows) - 20} more" if len(rows) > 20 else shown


def _cells(tensor: Tensor, side: str) -> tuple[str, ...]:
    numbers = (tensor.minimum, tensor.maximum, tensor.mean)
    counts = (tensor.nan, tensor.inf, tensor.zeros)
    return (
        f"{side} {tensor.name or ''}".strip(),
        str(list(tensor.shape)),
        tensor.dtype,
        *("" if number is None else f"{number:.4g}" for number in numbers),
        *("" if count is None else str(count) for count in counts),
    )
