"""`guard`: a step that went wrong changes nothing, on any device, and is named."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._core.errors import CheckError, NonFiniteError, ReplicasError, StepError
from .._core.levels import require_positive
from .._core.order import require_once
from .._core.step import (
    AbstractLayer,
    Advance,
    Outcome,
    StepAround,
    Take,
    View,
    as_step,
    keep,
)
from .._guard.findings import Watch
from .._guard.spikes import Spike
from .._guard.trips import Alarm, Trip, make_alarm
from .._metrics import Sum, map_metrics
from .._state.train_state import Parts
from .._util.extras import extra
from .._util.text import call, made_by

CHECKS = ("user", "float", "index", "division")


def guard(
    given: Any = None,
    *,
    nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    checks: str | Iterable[str] = "user",
    max_consecutive: int = 25,
    spike: Spike | None = None,
    replicas_every: int | None = None,
    bundles: str | os.PathLike[str] | None = None,
) -> Any:
    """Looks at a step before it is taken: is it finite, and does every check of the loss hold?

    The loss and the norm of the gradients are those of the global batch, so every device decides
    alike; the new parameters have to be finite too, which a learning rate may prevent. A bad step
    keeps the whole old TrainState bit for bit: parameters, optimizer and its schedule, averages,
    BatchNorm statistics. Only `step` (and with it the keys) and the counts of skipped steps go on,
    and so does the data. A window of microbatches is skipped as a whole. Its metrics are left out
    of sums.

    A `jax.experimental.checkify.check` in the loss, anywhere but in a function with a derivative of
    its own, works under all transforms. `program.trips` has the last steps that tripped the guard,
    each with the checks that failed by device, microbatch and example; `program.explain(ts, batch)`
    replays one and names what went wrong first.

    **Arguments:**

    - `nonfinite`: what happens to a bad step. `"skip"` goes on with the next batch; `"raise"`
      raises, with the TrainState from before the failure as `error.state`; `"ignore"` only counts.
    - `checks`: which checks a step makes, one name or several: `"user"`, those of the loss;
      `"float"`, that no primitive makes a NaN, in the backward pass either, though nothing came of
      it; `"index"`, that no index is out of bounds, where JAX clips it; `"division"`, that no
      integer is divided by zero. All but the first watch every primitive, at the price that
      docs/guard.md gives. `()` is none.
    - `max_consecutive`: so many skipped steps in a row raise. What was dispatched in between is
      held back. From a TrainState that comes from elsewhere, as from a checkpoint, they are counted
      anew. Nothing is held back, and nobody raises, where a step is not compiled by the kit.
    - `spike`: records steps whose loss or gradients stand out, or skips them.
    - `replicas_every`: after so many steps a checksum of every array that several devices hold is
      compared. It takes `et.shard`, and a compiled step.
    - `bundles`: a folder. The first 3 bad steps (and spikes, where they are skipped) leave a replay
      bundle there. The step after a bad one waits for that. One that cannot be written is a
      warning; a batch of other containers than dicts, lists and tuples is refused.

    **Returns:** a Step with `skipped` among its metrics (`nonfinite` where it only counts), and
    `spike` where it looks for those. Used bare (`@et.guard`) or with arguments.

    **Raises:** `NonFiniteError`, `CheckError` or `ReplicasError`, when the step is compiled, at the
    call after the bad one or in `program.check(ts)`: flags are read one step late, so that the
    device never waits for Python.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean(jnp.log(batch["x"]) * model), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(nonfinite="skip"))
    >>> ts = step.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
    >>> ts, metrics = step(ts, {"x": jnp.array([1.0, -1.0])})
    >>> float(ts.model), float(metrics["skipped"])
    (1.0, 1.0)

    ```
    """
    if nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(
            f"`nonfinite` must be 'skip', 'raise' or 'ignore'. Got {nonfinite!r}. Choose one."
        )
    chosen = (checks,) if isinstance(checks, str) else tuple(checks)
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise ValueError(f"`checks` must be of {CHECKS}. Got {unknown}. Leave out the others.")
    require_positive("max_consecutive", max_consecutive, "25 is usual")
    if replicas_every is not None:
        require_positive("replicas_every", replicas_every, "1000 costs next to nothing")
    if bundles is not None and nonfinite == "ignore":
        raise ValueError(
            "A step that is not held back leaves no state to save. "
            "Got `bundles=` with `nonfinite='ignore'`. Use 'skip' or 'raise'."
        )
    if spike is not None and spike.skip and nonfinite != "skip":
        raise ValueError(
            "Spikes are skipped where bad steps are. "
            f"Got `Spike(skip=True)` with nonfinite={nonfinite!r}. Use 'skip', or only record them."
        )
    if bundles is not None:  # better now than when the first step trips
        extra("safetensors.numpy", "safetensors", "Replay bundles are files of safetensors.")
    settings = Settings(
        nonfinite,
        chosen,
        max_consecutive,
        spike,
        replicas_every,
        None if bundles is None else os.fspath(bundles),
    )
    return (lambda given: Guard(given, settings)) if given is None else Guard(given, settings)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `guard`."""

    nonfinite: str = "skip"
    checks: tuple[str, ...] = ("user",)
    max_consecutive: int = 25
    spike: Spike | None = None
    replicas_every: int | None = None
    bundles: str | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of checks that watch every primitive."""
        return tuple(name for name in self.checks if name != "user")

    @property
    def skips_spikes(self) -> bool:
        return self.spike is not None and self.spike.skip

    @property
    def waits(self) -> bool:
        """Whether nothing moves after a bad step until the host has saved a replay bundle."""
        return self.bundles is not None

    def text(self) -> str:
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        if self.spike is not None:
            given["spike"] = made_by(self.spike)
        return call("guard", **given)


class Verdict(NamedTuple):
    """What a guard says of a step.

    **Fields:** `held`, nothing may move, since an earlier step failed; `failed`; `bad`, which is
    failed or skipped by loss scaling; the `causes`, by name; and the `limits` beyond which the loss
    and the norm of the gradients are a spike.
    """

    held: Bool[Array, ""]
    failed: Bool[Array, ""]
    bad: Bool[Array, ""]
    causes: dict[str, Bool[Array, ""]]
    limits: tuple[Array, Array]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Guard(StepAround, AbstractLayer):
    """A step that changes nothing where it went wrong. Its counts are in `extra["guard"]`."""

    settings: Settings

    # Around an average, which so is held back with the step.
    depth: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_step(self.inner, self.source))
        require_once(self)
        if self.settings.replicas_every is not None and self.inner.layout is None:
            raise ValueError(
                "Replicas are copies of an array on several devices. Got `replicas_every="
                f"{self.settings.replicas_every}` and a chain without a mesh. "
                "Put `et.shard` before `et.update`."
            )

    @property
    def source(self) -> str:
        return self.settings.text()

    @property
    def view(self) -> View:
        watch = _watch() if self.settings.classes else None
        return View(checks="user" in self.settings.checks, watch=watch)

    @property
    def replicas_every(self) -> int | None:
        return self.settings.replicas_every

    @property
    def bundles(self) -> str | None:
        return self.settings.bundles

    def add_to(self, parts: Parts) -> Parts:
        counts: dict[str, Any] = {
            name: jnp.zeros((), jnp.int32) for name in ("skipped", "in_a_row")
        }
        counts["last_bad"] = jnp.full((), -1, jnp.int32)
        if self.settings.spike is not None:
            counts["spike"] = self.settings.spike.begin()
        if self.settings.waits:
            counts["waiting"] = jnp.zeros((), bool)
        return dataclasses.replace(parts, extra={**parts.extra, "guard": counts})

    def wrap(self, advance: Advance, *, seen: bool) -> Advance:
        def guarded(parts: Parts, batch: PyTree) -> tuple[Take, Outcome]:
            take, outcome = advance(parts, batch)
            return self._after(parts, take, outcome, seen)

        return guarded

    def _after(self, old: Parts, take: Take, outcome: Outcome, seen: bool) -> tuple[Take, Outcome]:
        counts = old.extra["guard"]
        # Nothing may wait for a host that does not look.
        held = self._held(counts) if seen else jnp.zeros((), bool)
        verdict = self._verdict(counts, outcome, held)
        after = self._counts_after(counts, old, outcome, verdict)

        def take_guarded() -> Parts:
            ignores = self.settings.nonfinite == "ignore"
            parts = take() if ignores else self._take(old, take, verdict)
            extra = {**parts.extra, "guard": after}
            if outcome.loss_scale is not None:
                extra["loss_scale"] = self._scale_after(old, outcome, verdict)
            return dataclasses.replace(parts, extra=extra)

        return take_guarded, dataclasses.replace(
            outcome,
            metrics=self._metrics(outcome, verdict),
            alarm=self._alarm(counts, after, old, outcome, verdict),
        )

    def _verdict(self, counts: dict[str, Any], outcome: Outcome, held: Any) -> Verdict:
        loss_ok, grads_ok = jnp.isfinite(outcome.loss), jnp.isfinite(outcome.grad_norm)
        # Loss scaling meets overflow on its own, and kept the old parts already.
        never = jnp.zeros((), bool)
        scaled = never if outcome.overflow is None else outcome.overflow & loss_ok
        causes = {
            "loss": ~loss_ok,
            "gradients": loss_ok & ~grads_ok & ~scaled,
            "update": loss_ok & grads_ok & ~outcome.finite(),
        }
        if outcome.findings is not None:
            causes["check"] = outcome.findings.failed()
            if self.settings.classes:
                causes["check"] |= outcome.findings.flags.set_off(self.settings.classes)
        limits = jnp.full((), jnp.inf), jnp.full((), jnp.inf)
        if self.settings.spike is not None:
            limits = self.settings.spike.limits(counts["spike"])
            spiked = (outcome.loss > limits[0]) | (outcome.grad_norm > limits[1])
            causes["spike"] = spiked & loss_ok & grads_ok
        causes = {name: on & ~held for name, on in causes.items()}
        failing = [
            on for name, on in causes.items() if name != "spike" or self.settings.skips_spikes
        ]
        failed = jnp.stack(failing).any()
        return Verdict(held, failed, failed | (scaled & ~held), causes, limits)

    def _counts_after(
        self, counts: dict[str, Any], old: Parts, outcome: Outcome, verdict: Verdict
    ) -> dict[str, Any]:
        held, failed, bad = verdict.held, verdict.failed, verdict.bad
        # A step that raises is taken again, and is none that the state has left behind.
        passed = bad & ~failed if self.settings.nonfinite == "raise" else bad
        in_a_row = jnp.where(held, counts["in_a_row"], jnp.where(failed, counts["in_a_row"] + 1, 0))
        after = {
            "skipped": counts["skipped"] + bad.astype(jnp.int32),
            "in_a_row": in_a_row,
            "last_bad": jnp.where(passed, old.step, counts["last_bad"]),
        }
        if self.settings.spike is not None:
            after["spike"] = self.settings.spike.remember(
                counts["spike"], outcome.loss, outcome.grad_norm, ~held
            )
        if self.settings.waits:
            after["waiting"] = counts["waiting"] | failed
        return after

    def _take(self, old: Parts, take: Take, verdict: Verdict) -> Parts:
        """The new parts, or the old ones where the step is bad."""
        parts = keep(~(verdict.bad | verdict.held), take, old)
        raises = self.settings.nonfinite == "raise"
        stays = verdict.held | verdict.failed if raises else verdict.held
        return dataclasses.replace(parts, step=jnp.where(stays, old.step, parts.step))

    def _scale_after(self, old: Parts, outcome: Outcome, verdict: Verdict) -> PyTree:
        """A scale learns from overflow, of which a loss that is not finite is no sign."""
        ignores = self.settings.nonfinite == "ignore"
        moves = ~verdict.held if ignores else ~(verdict.held | verdict.failed)
        return jax.tree.map(
            lambda a, b: jnp.where(moves, a, b), outcome.loss_scale, old.extra["loss_scale"]
        )

    def _metrics(self, outcome: Outcome, verdict: Verdict) -> dict[str, PyTree]:
        metrics = dict(outcome.metrics)
        if self.settings.nonfinite == "ignore":
            counted = "nonfinite"
        else:
            counted, metrics = "skipped", _left_out(verdict.bad | verdict.held, metrics)
        metrics[counted] = Sum(verdict.bad.astype(jnp.int32))
        if self.settings.spike is not None:
            metrics["spike"] = Sum(verdict.causes["spike"].astype(jnp.int32))
        return metrics

    def _alarm(
        self,
        counts: dict[str, Any],
        after: dict[str, Any],
        old: Parts,
        outcome: Outcome,
        verdict: Verdict,
    ) -> Alarm:
        causes, in_a_row = verdict.causes, after["in_a_row"]
        if self.settings.nonfinite == "ignore":
            causes = {name: on for name, on in causes.items() if name == "spike"}
            in_a_row = jnp.zeros_like(in_a_row)
        if self.settings.waits:
            # One that waits is looked at already; one held for another reason has to say so.
            in_a_row = jnp.where(counts["waiting"], 0, in_a_row)
        numbers = (outcome.loss, outcome.grad_norm, *verdict.limits)
        return make_alarm(causes, in_a_row, old.step, numbers, outcome.findings)

    def _held(self, counts: dict[str, Any]) -> Bool[Array, ""]:
        """Whether nothing may move: what was dispatched before the host saw a failure."""
        held = jnp.zeros((), bool)
        if self.settings.nonfinite != "ignore":
            most = 1 if self.settings.nonfinite == "raise" else self.settings.max_consecutive
            held = held | (counts["in_a_row"] >= most)
        if self.settings.waits:
            held = held | counts["waiting"]
        return held

    def after_error(self, parts: Parts) -> Parts:
        """Lets steps be taken again after an error."""
        in_a_row = jnp.zeros_like(parts.extra["guard"]["in_a_row"])
        return _with_counts(self.after_wait(parts), in_a_row=in_a_row)

    def after_wait(self, parts: Parts) -> Parts:
        """Lets steps be taken again after what they waited for."""
        if not self.settings.waits:
            return parts
        return _with_counts(parts, waiting=jnp.zeros_like(parts.extra["guard"]["waiting"]))

    def from_elsewhere(self, parts: Parts) -> Parts:
        """Goes on counting with nothing held back; but what was to be raised is raised."""
        in_a_row = parts.extra["guard"]["in_a_row"]
        if self.settings.nonfinite == "raise" and in_a_row > 0:
            raise NonFiniteError(
                "A step that fails must be seen. Got a TrainState that such a step returned, or a "
                "copy, which no longer says what it was. Go on from `error.state`, the same with "
                "nothing held back; give a program what it returned, and it says more."
            )
        held = in_a_row >= self.settings.max_consecutive
        return _with_counts(self.after_wait(parts), in_a_row=jnp.where(held, 0, in_a_row))

    def error_of(self, trip: Trip) -> StepError | None:
        if "replicas" in trip.causes:
            return ReplicasError(
                f"All copies of an array must be equal. Got {trip}. A device that computes wrong, "
                "or a collective that is missing, lets them drift apart. Go back to a checkpoint "
                "from before, and leave out the device."
            )
        if self.settings.nonfinite == "raise" and trip.in_a_row:
            if "check" in trip.causes:
                return CheckError(
                    f"Every check of the loss must hold. Got {trip}\n"
                    "`error.state` is the TrainState from before it."
                )
            return NonFiniteError(
                "The loss or the gradients of a step were not finite, or what became of the "
                f"parameters. Got {trip}. `error.state` is the TrainState from before it, and "
                "`program.explain(error.state, batch)` names what went wrong first. "
                'Go on past single bad steps with `guard(nonfinite="skip")`.'
            )
        if self.settings.nonfinite == "skip" and trip.in_a_row >= self.settings.max_consecutive:
            return NonFiniteError(
                f"So many steps in a row must not fail. Got {trip.in_a_row} steps whose loss, "
                "gradients or checks went wrong, all skipped; `error.state` is the TrainState from "
                f"before them. The last was {trip}. "
                "Lower the learning rate, or look at the data: `program.explain(error.state, "
                "batch)`."
            )
        return None


def _with_counts(parts: Parts, **counts: Any) -> Parts:
    extra = {**parts.extra, "guard": {**parts.extra["guard"], **counts}}
    return dataclasses.replace(parts, extra=extra)


def _watch() -> Watch:
    from ..explain.watch import watching  # few guards need it, and it takes long to import

    return watching()


def _left_out(bad: Bool[Array, ""], metrics: dict[str, PyTree]) -> dict[str, PyTree]:
    """The metrics, of which nothing is left where the step is not taken."""
    return map_metrics(
        lambda metric: jax.tree.map(
            lambda neutral, x: jnp.where(bad, neutral, x), metric.neutral(), metric
        ),
        metrics,
    )
