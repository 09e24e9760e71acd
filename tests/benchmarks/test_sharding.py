"""The figures of `benchmarks/sharding.py`, and a short run of it."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import sharding, sharding_steps
from eqtrain._programs.cost import Collective, Inspection

ROOT = Path(__file__).parent.parent.parent
# Set by conftest.py for this process; the script's children choose their own devices and threads.
OURS = ("XLA_FLAGS", "NPROC")


def inspection(*collectives: Collective) -> Inspection:
    return Inspection(collectives, 0.0, 0, 0, 0, 0)


def contender(name: str, step_ms: list[float], moved: int, temporary: int) -> sharding.Contender:
    costs = {"moved_bytes": moved, "temporary_bytes": temporary, "argument_bytes": 100}
    return sharding.Contender(name, name, [], costs, [1.0], step_ms)


def test_a_ring_sends_as_much_for_a_scatter_and_a_gather_as_for_their_all_reduce():
    whole = Collective("all-reduce", ("f32[100]",), 400, 3, 4)
    gather = Collective("all-gather", ("f32[100]",), 400, 3, 4)
    scatter = Collective("reduce-scatter", ("f32[25]",), 100, 3, 4)
    assert sharding_steps.moved_bytes(inspection(whole), 4) == {"all-reduce": 1800}
    parts = sharding_steps.moved_bytes(inspection(gather, scatter), 4)
    assert parts == {"all-gather": 900, "reduce-scatter": 900}


def test_moved_bytes_take_all_devices_where_the_text_lists_none():
    listed, unlisted = (Collective("all-gather", ("f32[8]",), 32, 1, n) for n in (2, 0))
    assert sharding_steps.moved_bytes(inspection(listed, listed), 8) == {"all-gather": 32}
    assert sharding_steps.moved_bytes(inspection(unlisted), 8) == {"all-gather": 28}


def test_a_ratio_is_the_median_of_those_within_a_round():
    # The machine is ten times slower in the second round, for both.
    assert sharding.paired([1.0, 30.0, 2.0], [2.0, 20.0, 2.0])["median"] == 1.0
    assert sharding.paired([1.0, 30.0, 9.0], [2.0, 20.0, 3.0])["median"] == 1.5


def test_goals_are_missed_where_ours_is_slower_or_needs_as_much_memory():
    pairs = {"ours_fsdp": "auto_fsdp", "pmap": "auto_fsdp"}
    contenders = [
        contender("ours_fsdp", [1.1, 1.1], 50, 70),
        contender("auto_fsdp", [1.0, 1.0], 50, 70),
        contender("pmap", [9.0, 9.0], 99, 99),
    ]
    lines = sharding.lines_of("4 devices", contenders, pairs)
    assert lines[0]["over"]["moved_bytes"] == 1.0
    assert "over" not in lines[1]
    what = "4 devices: ours_fsdp over auto_fsdp"
    assert sharding.goals_of(lines) == {
        f"{what}: step <= 1": False,
        f"{what}: moved <= 1": True,
        f"{what}: temporary < 1": False,
    }


def test_contenders_with_other_losses_stop_the_run():
    sharding.require_same_losses({"a": [4.0, 3.0], "b": [4.0, 3.0002]})
    with pytest.raises(RuntimeError, match="the same steps.*of `b`"):
        sharding.require_same_losses({"a": [4.0, 3.0], "b": [4.0, 3.001]})


def test_num_params_is_that_of_the_model():
    size = sharding_steps.SIZES["tiny"]
    model = jax.eval_shape(sharding_steps.make_model(size), jax.random.key(0))
    assert size.num_params == sum(leaf.size for leaf in jax.tree.leaves(model))


def test_a_quick_run_ends_with_its_summary():
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    command = "benchmarks/sharding.py --quick --rounds 2 --no-torch --devices 4 --contenders"
    done = subprocess.run(
        [sys.executable, *command.split(), "ours_fsdp_lazy", "auto_fsdp"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    *contenders, final = lines
    assert [line["contender"] for line in contenders] == ["ours_fsdp_lazy", "auto_fsdp"]
    ours, auto = contenders
    assert ours["over"]["contender"] == "auto_fsdp"
    assert ours["losses"] == pytest.approx(auto["losses"], rel=1e-4)
    assert ours["moved_bytes"] < auto["moved_bytes"]
    assert len(final["goals"]) == 3
    assert final["rounds"] == 2
    assert final["versions"]["jax"] == jax.__version__


def test_two_processes_take_the_steps_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    args = argparse.Namespace(quick=True, rounds=2, steps=1, contenders=[], texts=None)
    run = sharding.Run(args, tmp_path)
    losses = []
    for devices, processes in ((2, 1), (1, 2)):
        with sharding.closing(run.jax_workers(devices, processes)) as workers:
            one = sharding.Contender("ours_fsdp_lazy", "", workers)
            one.make()
            losses.append(one.losses)
    # The same sums, in another order where they are gloo's.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
