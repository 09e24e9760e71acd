"""A run that a signal asks to end: alone, and in two processes that agree on the step."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import eqtrain as et
from eqtrain.checkpoint import read_metadata, restore
from tests.checkpoint.programs import copies, different, init, make, make_loader, program, run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noticed_and_stays_so(number):
    before = signal.getsignal(number)
    with et.Preemption() as preemption:
        assert not preemption.poll()
        os.kill(os.getpid(), number)
        assert preemption.poll() and preemption.poll()
    assert signal.getsignal(number) is before


def test_other_signals_are_left_alone():
    # What a shell runs in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with et.Preemption(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exit_has_a_code_of_its_own():
    with pytest.raises(SystemExit) as error:
        raise et.Preempted
    assert error.value.code == et.Preempted.EXIT_CODE == 75 == os.EX_TEMPFAIL


def test_another_thread_than_the_main_one_is_refused():
    errors: list[str] = []

    def enter() -> None:
        try:
            with et.Preemption():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter, name="reader")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "Got thread 'reader'" in errors[0]


CHILD = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import jax

    folder, address, index, count, stop, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    if count > 1:
        jax.distributed.initialize(address, num_processes=count, process_id=index)
    import eqtrain as et
    from tests.checkpoint.programs import make, make_loader, make_program

    program, loader = make_program(4, order="tree", lanes=4), make_loader()
    with et.checkpoint.Checkpoints(folder) as checkpoints, et.Preemption() as preemption:
        ts = checkpoints.restore_or_init(program, make, key=jax.random.key(7), loader=loader)
        for _ in range(3):  # a loop of warm-up, in which it is polled too
            assert not preemption.poll()
        with et.data.prefetch(loader, program.batch_sharding) as batches:
            for _ in range(steps - int(ts.step)):
                ts, metrics = program(ts, next(batches))
                if int(ts.step) == stop and index == count - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if preemption.poll():
                    checkpoints.save(ts, loader, program=program)
                    raise et.Preempted
        checkpoints.save(ts, loader, program=program)
        # What one process finds is raised in all of them, or the others would wait for ever.
        for action in (
            lambda: et.checkpoint.Checkpoints(folder),
            lambda: et.checkpoint.restore(f"{folder}-damaged", ts),
        ):
            try:
                action()
            except et.checkpoint.CheckpointError as error:
                print("refused:", error, file=sys.stderr, flush=True)
    """
)


def processes(folder: Path, count: int, stop: int, steps: int) -> tuple[list[int], list[str]]:
    """Trains on four devices in so many processes; the exit code of each, and what it wrote."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flag = f"--xla_force_host_platform_device_count={4 // count}"
    settings = {
        "XLA_FLAGS": f"{flag} --xla_cpu_multi_thread_eigen=false",
        "PYTHONPATH": str(ROOT),
        # The second time nothing is compiled.
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error"),
                # One process may read from the cache what the other is writing.
                *("-W", "ignore:Error reading persistent compilation cache entry"),
                *("-c", CHILD, str(folder), address),
                *map(str, (index, count, stop, steps)),
            ],
            env=os.environ | settings,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    codes = [child.returncode for child in children]
    assert set(codes) <= {0, 75}, "\n".join(errors)
    return codes, errors


def test_two_processes_stop_at_one_step_and_go_on_as_one_and_two(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    # One of the two gets the signal, at its fourth step.
    assert processes(tmp_path / "run", 2, stop=4, steps=12)[0] == [75, 75]
    found = read_metadata(tmp_path / "run")
    assert (
        found.step in (4, 5)
        and found.processes == 2
        and found.position == found.step * 8 - (0 if found.step < 6 else 4)
    )
    # What two processes saved, one reads, with the bits of a run that nothing stopped.
    step, loader = program(4, "tree", 4), make_loader()
    ts, _ = run(step, init(step), loader, found.step)
    assert different(copies(restore(tmp_path / "run", step.init_shapes(make))), copies(ts)) == []
    # And two go on from it to the end.
    damaged = tmp_path / "run-damaged" / str(found.step)
    shutil.copytree(tmp_path / "run" / str(found.step), damaged)
    victim = max((damaged / "state").rglob("*"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    codes, errors = processes(tmp_path / "run", 2, stop=-1, steps=9)
    assert codes == [0, 0]
    assert [error.count("refused:") for error in errors] == [2, 2]
    assert "this process has open" in errors[0] and str(victim) in "".join(errors)
    ts, _ = run(step, ts, loader, 9 - found.step)
    assert different(copies(restore(tmp_path / "run", step.init_shapes(make))), copies(ts)) == []
