"""The error for a transform in the wrong place, with the line to write instead."""

from __future__ import annotations

from typing import Any

from .level import Level, pipeline, written


class OrderError(TypeError):
    """A transform was given a level that it cannot take."""


def require_once(level: Level) -> None:
    """Refuses a transform that is in the chain already."""
    before = level.inner.chain if isinstance(level.inner, Level) else ()
    for other in before:
        if type(other) is type(level):
            verb = str(level.source).split("(")[0]
            raise OrderError(
                f"`{verb}` may occur once in a chain. Got `{level.source}` after "
                f"`{other.source}`, in {written(before)}. Remove one of the two."
            )


def order_error(source: str, takes: tuple[type[Level], ...], given: Any) -> OrderError:
    """The error for `source` applied to the wrong level, with the line to write instead.

    `takes` are the levels that it could take, the nearest to the loss first.
    """
    wanted = f"{_article(takes[0])} {' or '.join(level.name for level in takes)}"
    if not isinstance(given, Level) and not callable(given):
        return OrderError(
            f"`{source}` takes {wanted}. Got {type(given).__name__}, which is no function. "
            f"Write `et.pipe(loss, ..., {source})`, or `@{source}` above the function."
        )
    if not isinstance(given, Level):
        return _too_early(source, f"`{source}` takes {wanted}. Got a Loss.", ())
    made = f", made by {written(given.chain)}" if given.chain else ""
    rule = f"`{source}` takes {wanted}. Got {_article(type(given))} {given.name}{made}."
    if given.rank < takes[0].rank:
        return _too_early(source, rule, given.chain)
    # The first transform that left the levels which this one takes is the line to move before.
    index = next(i for i, level in enumerate(given.chain) if level.rank > takes[-1].rank)
    return _too_late(source, takes, rule, given.chain, index)


def _too_early(source: str, rule: str, chain: tuple[Level, ...]) -> OrderError:
    right = [*_sources(chain), "et.update(optimizer)", source]
    return OrderError(
        f"{rule} `et.update(optimizer)` makes a Step of it. Write {_line(right)}, "
        f"or as decorators `@{source}` above `@et.update(optimizer)`."
    )


def _too_late(
    source: str, takes: tuple[type[Level], ...], rule: str, chain: tuple[Level, ...], index: int
) -> OrderError:
    sources, first = _sources(chain), chain[index]
    two_chains = f"{rule} What measures and what trains are two chains."
    if first.name == "Evaluation":
        return OrderError(f"{two_chains} Start from the loss again, without `{first.source}`.")
    if first.name == "Program" and takes[0].name == "Step" and _compiles(source):
        return OrderError(
            f"{rule} A chain ends with one of the two. Remove `{first.source}`: "
            f"{_line([*sources[:index], source])}."
        )
    if source.startswith("et.evaluate"):
        return OrderError(
            f"{two_chains} End one before `{first.source}`: {_line([*sources[:index], source])}."
        )
    right = [*sources[:index], source, *sources[index:]]
    return OrderError(
        f"{rule} Move it before `{first.source}`: {_line(right)}, "
        f"or as decorators `@{source}` below `@{first.source}`."
    )


def _compiles(source: str) -> bool:
    return source.split("(")[0] in ("et.jit", "et.donate")


def _sources(chain: tuple[Level, ...]) -> list[str]:
    return [str(level.source) for level in chain]


def _line(sources: list[str]) -> str:
    return f"`{pipeline(['loss', *sources])}`"


def _article(level: type[Level]) -> str:
    return "an" if level.name[0] in "AEIOU" else "a"
