"""The errors of a step that went wrong."""

from __future__ import annotations

from .._guard.trips import Trip
from .._state.train_state import TrainState


class StepError(Exception):
    """A step of training failed.

    `state` is the TrainState from before the failure, from which training can go on, and `trip`
    says what was seen.
    """

    state: TrainState | None = None
    trip: Trip | None = None


class NonFiniteError(StepError, FloatingPointError):
    """The loss, the gradients or the new parameters of a step were not finite."""


class CheckError(StepError, ValueError):
    """A `checkify.check` of the loss failed."""


class ReplicasError(StepError, RuntimeError):
    """Copies of one array, on several devices, are no longer equal."""
