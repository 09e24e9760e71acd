"""The default tier of a product has its corners, and every two options together."""

import itertools

from tests.tiers import pairwise


def cases_of(mark):
    names, params = mark.args
    default = [param.values for param in params if not param.marks]
    return names, default, [param.values for param in params]


def test_each_two_options_meet_and_the_corners_are_in():
    options = {"devices": [1, 2, 4, 8], "microbatches": [1, 2, 4], "order": ["a", "b"]}
    names, default, cases = cases_of(pairwise(options))
    assert names == tuple(options)
    assert cases == list(itertools.product(*options.values()))
    assert {(1, 1, "a"), (8, 4, "b")} <= set(default)
    for one, other in itertools.combinations(range(3), 2):
        met = {(case[one], case[other]) for case in default}
        assert met == {(case[one], case[other]) for case in cases}
    # Not much more than the two longest lists need, and half of all.
    assert 12 <= len(default) <= 14


def test_cases_that_are_one_program_occur_once():
    options = {"devices": [1, 2], "placement": ["replicate", "fsdp"]}
    same = lambda devices, placement: devices == 1 and placement == "fsdp"  # noqa: E731
    _, default, cases = cases_of(pairwise(options, same=same))
    assert (1, "fsdp") not in cases and len(cases) == 3
    assert set(default) == set(cases)
