"""Checks that failed: what each says, and where it stood, read on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from .._jaxpr.frames import Frame
from .._sharding.placement import Layout
from .._util.internals import error_text
from .findings import AbstractFlags, Findings


@dataclasses.dataclass(frozen=True)
class Failure:
    """One check that failed.

    **Fields:** the `message`; `frames`, the user's code, the innermost call first; `device`, its
    coordinates on the mesh; `microbatch`; `example`, the row of the global batch if the check is
    one of each example; `index`, where else it stood, such as the turn of a loop.
    """

    message: str
    frames: tuple[Frame, ...]
    device: dict[str, int]
    microbatch: int
    example: int | None = None
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = [f"device {place_text(self.device)}"] if self.device else []
        where.append(f"microbatch {self.microbatch}")
        if self.example is not None:
            where.append(f"example {self.example} of the global batch")
        if self.index:
            where.append(f"index {list(self.index)}")
        line = f" at {self.frames[0]}" if self.frames else ""
        line += f": `{self.frames[0].code}`" if self.frames and self.frames[0].code else ""
        return f"{self.message}{line} ({', '.join(where)})"


def place_text(device: dict[str, int]) -> str:
    return ", ".join(f"{axis}={place}" for axis, place in device.items())


def failures(findings: Findings | None, layout: Layout | None) -> tuple[Failure, ...]:
    """The checks that failed, by device, microbatch and example."""
    if findings is None:
        return ()
    return (*_of_checks(findings, layout), *_of_flags(findings.flags, layout))


def _of_checks(findings: Findings, layout: Layout | None) -> Iterator[Failure]:
    for site, given in zip(findings.sites, findings.checks, strict=True):
        _, num_microbatches, *dims = given[0].shape
        for (device, microbatch, *index), error in site.errors(given):
            example = None
            if dims[site.loops : site.loops + 1] == [findings.rows]:
                part = part_of_rows(device, layout) * num_microbatches + microbatch
                example = part * findings.rows + index.pop(site.loops)
            place = coordinates(device, layout)
            yield Failure(error_text(error), site.frames, place, microbatch, example, tuple(index))


def _of_flags(flags: AbstractFlags | None, layout: Layout | None) -> Iterator[Failure]:
    if flags is None:
        return
    for device, microbatch in np.ndindex(flags.lanes):
        for frames, message in flags.met_in((device, microbatch)):
            yield Failure(message, frames, coordinates(device, layout), microbatch)


def coordinates(device: int, layout: Layout | None) -> dict[str, int]:
    """Where on the mesh the device of that number lies."""
    if layout is None:
        return {}
    axes = layout.mesh.axis_names
    places = np.unravel_index(device, [layout.mesh.shape[axis] for axis in axes])
    return {axis: int(place) for axis, place in zip(axes, places, strict=True)}


def part_of_rows(device: int, layout: Layout | None) -> int:
    """Which part of the global batch's rows that device has."""
    if layout is None:
        return 0
    place = coordinates(device, layout)
    part = 0
    for axis in layout.example_axes:
        part = part * layout.mesh.shape[axis] + place[axis]
    return part
