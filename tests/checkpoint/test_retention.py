"""Which checkpoints are kept. The pure rule here; what is on disk in tests/cases."""

import math

import pytest

from eqtrain.checkpoint.retention import Retention


def kept(steps: list[int], losses: dict[int, float] | None = None, **settings) -> list[int]:
    metrics = {step: {"loss": losses[step]} if losses and step in losses else {} for step in steps}
    return sorted(Retention(**settings).kept(metrics))


def test_the_newest_go_by_number_and_not_by_text():
    assert kept([9000, 10000, 10], keep_last=1) == [10000]
    assert max(["9000", "10000", "10"]) == "9000"  # what text order would say


def test_the_best_are_kept_beside_the_newest():
    losses = {step: abs(step - 3.5) for step in range(1, 12)}
    steps = list(range(1, 12))
    assert kept(steps, losses, keep_last=2, keep_best=2) == [3, 4, 10, 11]
    assert kept(steps, losses, keep_last=1, keep_best=2, best_mode="max") == [10, 11]
    accuracy = Retention(keep_last=1, keep_best=1, best_metric="accuracy", best_mode="max")
    assert accuracy.kept({1: {"accuracy": 0.9}, 2: {"accuracy": 0.1}, 3: {}}) == {1, 3}


def test_of_two_equally_good_ones_the_earlier_is_kept():
    assert kept([1, 2, 3, 4], {1: 0.5, 2: 0.25, 3: 0.25, 4: 1.0}, keep_last=1, keep_best=1) == [
        2,
        4,
    ]


def test_one_without_a_metric_or_with_nan_is_never_the_best():
    losses = {1: math.nan, 3: 2.0}
    assert kept([1, 2, 3, 4], losses, keep_last=1, keep_best=4) == [3, 4]
    assert kept([1, 2, 3, 4], losses, keep_last=1, keep_best=4, best_mode="max") == [3, 4]


def test_multiples_are_kept_for_ever():
    assert kept(list(range(1, 12)), keep_last=1, keep_every=4) == [4, 8, 11]


def test_none_keeps_all():
    assert kept(list(range(1, 12)), keep_last=None) == list(range(1, 12))


@pytest.mark.parametrize(
    "settings",
    [{"keep_last": 0}, {"keep_last": -1}, {"keep_best": -1}, {"keep_every": 0}, {"keep_every": -2}],
)
def test_settings_that_could_mean_delete_all_are_refused(settings):
    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=rf"`{name}` must .* Got {value}\. Use"):
        Retention(**settings)


def test_an_unknown_mode_is_refused():
    retention = Retention()
    # The annotation is checked in tests only, so past it.
    object.__setattr__(retention, "best_mode", "lowest")
    with pytest.raises(ValueError, match='`best_mode` must be "min" or "max". Got \'lowest\''):
        retention.__post_init__()
