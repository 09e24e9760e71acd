"""What goes wrong with disks, files and other runs. Case 50, and its kinds."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqtrain as et
from eqtrain.checkpoint import CheckpointError, Checkpoints, read_metadata, restore
from eqtrain.checkpoint.folder import Folder
from eqtrain.checkpoint.metadata import steps_in
from eqtrain.checkpoint.retention import Retention
from eqtrain.checkpoint.storage import UNFINISHED
from tests.checkpoint.programs import copies, different, init, make, make_loader, program, run

ocp = pytest.importorskip("orbax.checkpoint")
ROOT = Path(__file__).parents[2]
# Not compressible, so that what does not fit is known.
BIG = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32)


@pytest.fixture
def collected() -> Iterator[None]:
    yield
    gc.collect()  # else another test gets the warnings


def noisy(test: Callable[..., None]) -> Callable[..., None]:
    """Where a write fails, TensorStore calls back into an event loop that Orbax has closed."""
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    return pytest.mark.usefixtures("collected")(test)


def at(ts: et.TrainState, step: int) -> et.TrainState:
    return ts.replace(step=jnp.array(step, jnp.int32))


@pytest.fixture(scope="module")
def first() -> et.TrainState:
    return init(program())


@pytest.fixture(scope="module")
def big() -> et.TrainState:
    """A TrainState of a megabyte."""

    def loss(model, state, batch, key):
        return et.mean((batch["x"] - model["w"]) ** 2), state, {}

    step = et.pipe(loss, et.update(optax.sgd(0.1), trainable=et.matching("w")), et.donate)
    return step.init(lambda key: {"w": jnp.zeros(()), "big": BIG}, key=jax.random.key(0))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


# Killed by SIGKILL: the child counts what Python does to the folder, and stops itself


CHILD = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import jax
    from tests.checkpoint.programs import init, make_program
    import eqtrain as et
    import jax.numpy as jnp

    folder, after = Path(sys.argv[1]), int(sys.argv[2])
    ts = init(make_program())
    with et.checkpoint.Checkpoints(folder, keep_last=1) as checkpoints:
        latest = checkpoints.latest()
        if latest is None:
            checkpoints.save(ts.replace(step=jnp.array(5, jnp.int32)))
            checkpoints.wait()
        else:
            checkpoints.restore(ts)
        count = 0

        def count_down(event, args):
            global count
            changes = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
            written = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if (event in changes or written) and str(folder) in os.fspath(args[0]):
                count += 1
                if count == after:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count_down)
        checkpoints.save(ts.replace(step=jnp.array(10, jnp.int32)))
    print("changes", count)
    """
)


def child(folder: Path, after: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(after)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How often an undisturbed save of step 10 over step 5 changes something in the folder."""
    folder = tmp_path_factory.mktemp("changes")
    result = child(folder, 0)
    assert steps_in(folder) == [10], result.stderr
    return int(result.stdout.split()[-1])


# The last ones rename the new checkpoint, then rename and delete the old one.
@pytest.mark.parametrize("part", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_a_save_that_is_killed_leaves_the_last_good_one(tmp_path, changes, first, part):
    assert changes > 12
    after = 1 + round(part * (changes - 1))
    result = child(tmp_path, after)
    assert result.returncode == -signal.SIGKILL, result.stderr
    before = names(tmp_path)
    latest = max(steps_in(tmp_path))
    assert latest in (5, 10)
    assert int(restore(tmp_path, first).step) == latest
    # The dead child's lock is no obstacle, and the next run deletes what it left.
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        ts = checkpoints.restore(first)
        assert int(ts.step) == latest
        checkpoints.save(at(ts, 11))
    assert names(tmp_path) == {"11"}
    if part == 0.4:
        assert len(before) > 1 and latest == 5  # something was left behind
    if part == 1.0:
        assert latest == 10


# The disk, and the folder


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets no file grow beyond `size`, as a full disk does not. Real, and without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@noisy
def test_a_save_that_fails_reaches_the_loop_and_harms_nothing(tmp_path, big):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(big, 5))
    checkpoints.wait()
    with largest_file(2**19):
        checkpoints.save(at(big, 10))  # goes on in the background
        with pytest.raises(CheckpointError) as error:
            checkpoints.wait()
    message = str(error.value)
    assert "in saving step 10" in message and "The last good one is of step 5." in message
    assert "File too large" in message
    assert names(tmp_path) == {"5"}  # what there was of step 10 is gone
    assert different(copies(checkpoints.restore(big)), copies(at(big, 5))) == []
    checkpoints.save(at(big, 10))
    checkpoints.wait()
    assert checkpoints.steps() == [5, 10]
    with largest_file(2**19):
        checkpoints.save(at(big, 11))
        # The next save says it too, and so does the end.
        with pytest.raises(CheckpointError, match="in saving step 11"):
            checkpoints.save(at(big, 12))
        checkpoints.save(at(big, 12))
        with pytest.raises(CheckpointError, match="in saving step 12"):
            checkpoints.close()
    assert steps_in(tmp_path) == [5, 10]


def test_writes_that_nobody_waits_for_leave_nothing_behind(tmp_path):
    folder = Folder(tmp_path, Retention())
    late = tmp_path / f"10{UNFINISHED}" / "state" / "d"

    def write() -> None:
        """As TensorStore goes on after the write that failed: it makes the folders it needs."""
        for number in range(200):
            with contextlib.suppress(OSError):  # deleted meanwhile
                late.mkdir(parents=True, exist_ok=True)
                (late / str(number)).touch()
        time.sleep(0.2)
        late.mkdir(parents=True, exist_ok=True)

    thread = threading.Thread(target=write)
    thread.start()
    folder.clean_after_failure()
    assert not thread.is_alive() and names(tmp_path) == set()
    # What cannot be deleted is said.
    late.mkdir(parents=True)
    tmp_path.chmod(0o777)
    late.parent.chmod(0o555)
    with unprivileged(tmp_path), pytest.raises(PermissionError, match="d'$"):
        folder.clean_after_failure()
    folder.release()


@noisy
def test_an_error_is_not_hidden_by_a_save_that_fails(tmp_path, big):
    with pytest.raises(KeyError) as error, largest_file(2**19):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(at(big, 1))
            raise KeyError("the loop's own")
    assert "in saving step 1" in error.value.__notes__[0]
    # An exit that says that all is saved does not stand.
    with pytest.raises(CheckpointError, match="in saving step 1"), largest_file(2**19):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(at(big, 1))
            raise et.Preempted


@noisy
def test_a_disk_that_is_full(tmp_path, big):
    command = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("Mounting a small file system needs privileges.")
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(at(big, 5))
            checkpoints.wait()
            checkpoints.save(at(big, 10))
            with pytest.raises(CheckpointError, match="(?i)no space left"):
                checkpoints.wait()
            assert names(tmp_path) == {"5"}
            assert different(copies(checkpoints.restore(big)), copies(at(big, 5))) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@contextlib.contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """As somebody whom the permissions of a folder bind, and who can reach it."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents):
        if parent.owner() == "root" and parent.name.startswith(("pytest-", "popen-", "test_")):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        assert os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_to(tmp_path, first):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="must be one to write to. Got .*: .*Not a directory"):
        Checkpoints(tmp_path / "file" / "run")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    with unprivileged(tmp_path), pytest.raises(CheckpointError, match="run/.lock"):
        Checkpoints(folder)


def test_a_folder_that_could_not_be_opened_can_be_opened_later(tmp_path):
    left = tmp_path / f"10{UNFINISHED}" / "state"
    left.mkdir(parents=True)
    (left / "file").touch()
    tmp_path.chmod(0o777)
    left.chmod(0o555)
    with unprivileged(tmp_path):
        with pytest.raises(CheckpointError, match="(file|state)'. Choose another folder, or"):
            Checkpoints(tmp_path)
        if os.geteuid() != 65534:  # its owner
            left.chmod(0o755)
    left.chmod(0o777)
    left.parent.chmod(0o777)
    with unprivileged(tmp_path):
        Checkpoints(tmp_path).close()
    assert names(tmp_path) == set()


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path, first):
    for name in ("2", "2024", "007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.txt").touch()
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.latest() is None
        for step in (5, 6, 7):
            checkpoints.save(at(first, step))
        checkpoints.wait()
        checkpoints.discard_after(6)
    assert names(tmp_path) == {"2", "2024", "007"}


def test_an_old_one_that_cannot_be_deleted_stops_no_run(tmp_path, first):
    os.chown(tmp_path, 65534, -1) if os.geteuid() == 0 else None
    with unprivileged(tmp_path), Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(at(first, 5))
        checkpoints.wait()
        (tmp_path / "5" / "state").chmod(0o555)
        checkpoints.save(at(first, 6))
        with pytest.raises(UserWarning, match="after step 6 was saved: .*Permission denied"):
            checkpoints.wait()
        assert checkpoints.steps() == [6]
        # It is tried again.
        (tmp_path / "5.deleted" / "state").chmod(0o755)
        checkpoints.save(at(first, 7))
        checkpoints.wait()
        assert names(tmp_path) == {"7"}
        (tmp_path / "7" / "state").chmod(0o555)
        with pytest.raises(CheckpointError, match="behind step 3 must go. .*Permission denied"):
            checkpoints.discard_after(3)
        (tmp_path / "7.deleted" / "state").chmod(0o755)
        assert checkpoints.steps() == []
        checkpoints.save(at(first, 7))  # which is gone, though not all of it
        checkpoints.wait()
        assert checkpoints.steps() == [7]


def test_one_that_cannot_be_deleted_keeps_no_other(tmp_path, first):
    os.chown(tmp_path, 65534, -1) if os.geteuid() == 0 else None
    with unprivileged(tmp_path):
        with Checkpoints(tmp_path, keep_last=None) as checkpoints:
            for step in range(5, 13):
                checkpoints.save(at(first, step))
            checkpoints.wait()
        for stuck in ("7", "9"):
            (tmp_path / stuck / "state").chmod(0o555)
        checkpoints = Checkpoints(tmp_path, keep_last=1)
        checkpoints.save(at(first, 13))
        with pytest.raises(UserWarning, match="after step 13 was saved: .*Permission denied"):
            checkpoints.close()
        assert names(tmp_path) == {"7.deleted", "9.deleted", "13"}
        # A run that is started again goes on with a warning, too.
        with pytest.warns(UserWarning, match="are not to be kept .*Permission denied"):
            checkpoints = Checkpoints(tmp_path, keep_last=1)
        assert checkpoints.steps() == [13]
        for stuck in ("7", "9"):
            (tmp_path / f"{stuck}.deleted" / "state").chmod(0o755)
        checkpoints.save(at(first, 14))
        checkpoints.close()
        assert names(tmp_path) == {"14"}


def test_a_name_that_does_not_reach_the_disk_is_a_save_that_failed(tmp_path, first, monkeypatch):
    def fails(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(at(first, 5))
    checkpoints.wait()
    monkeypatch.setattr("eqtrain.checkpoint.folder.sync_folder", fails)  # as a broken disk does
    checkpoints.save(at(first, 6))
    for wait in (checkpoints.wait, lambda: checkpoints.save(at(first, 6))):  # again, as it says
        with pytest.raises(CheckpointError, match="in saving step 6 .*Input/output error"):
            wait()
    assert 5 in steps_in(tmp_path)  # none is deleted for one that may not be there
    monkeypatch.undo()
    checkpoints.save(at(first, 6))
    checkpoints.close()
    assert 6 in steps_in(tmp_path)


def test_an_old_one_that_somebody_deleted_is_gone(tmp_path, first):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(at(first, 5))
        checkpoints.wait()
        shutil.rmtree(tmp_path / "5")
        checkpoints.save(at(first, 6))
    assert names(tmp_path) == {"6"}


def test_one_that_is_deleted_while_it_is_read(tmp_path, whole, first, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    read_text = Path.read_text

    def read_and_delete(path: Path, *args: Any, **settings: Any) -> str:
        """The run that writes deletes it between two files that are read."""
        text = read_text(path, *args, **settings)
        if path.name == "metadata.json":
            shutil.rmtree(folder / "5")
        return text

    monkeypatch.setattr(Path, "read_text", read_and_delete)
    with pytest.raises(CheckpointError, match="run/5`, which was deleted meanwhile: .* Restore ag"):
        restore(folder, first)


SAVED_LAST = """
import sys
import jax, jax.numpy as jnp, optax
import eqtrain as et

def loss(model, state, batch, key):
    return et.mean((batch["x"] - model) ** 2), state, {}

step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
ts = step.init(lambda key: jnp.zeros(1_000_000), key=jax.random.key(0))
checkpoints = et.checkpoint.Checkpoints(sys.argv[1])
checkpoints.save(ts)
"""


def test_a_save_that_is_the_last_line_of_a_script_is_finished(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", SAVED_LAST, str(tmp_path / "run")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and steps_in(tmp_path / "run") == [0], result.stderr
    # What goes wrong in it is said, since no call is left that could raise it.
    limited = ["bash", "-c", 'ulimit -f 2000; exec "$@"', "bash", *command[:-1]]
    result = subprocess.run(
        [*limited, str(tmp_path / "other")], env=environment, capture_output=True, text=True
    )
    assert "eqtrain: A checkpoint must reach the disk. Got an error in saving" in result.stderr
    assert steps_in(tmp_path / "other") == []
    # Also where nobody holds the object any more.
    collected = "while not checkpoints.saved(): pass\ndel checkpoints\nimport gc; gc.collect()\n"
    limited[-1] = SAVED_LAST + collected
    result = subprocess.run(
        [*limited, str(tmp_path / "other")], env=environment, capture_output=True, text=True
    )
    assert "eqtrain: A checkpoint must reach the disk. Got an error in saving" in result.stderr


FORKED = """
import multiprocessing, sys, warnings
import jax, jax.numpy as jnp, optax
import eqtrain as et

warnings.simplefilter("ignore")  # JAX's and Python's, that a process with threads is forked

def loss(model, state, batch, key):
    return et.mean((batch["x"] - model) ** 2), state, {}

step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
ts = step.init(lambda key: jnp.zeros(20_000_000), key=jax.random.key(0))

checkpoints = et.checkpoint.Checkpoints(sys.argv[1])
checkpoints.save(ts)
assert not checkpoints.saved(), "the save ended before the fork"
process = multiprocessing.get_context("fork").Process(target=print)
process.start()
process.join(60)
print("child", process.exitcode)
checkpoints.close()
"""


def test_a_process_that_is_forked_during_a_save_ends(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "child 0" in result.stdout, result.stdout + result.stderr
    assert steps_in(tmp_path) == [0]


def test_a_bucket_is_refused():
    with pytest.raises(ValueError, match="Got `gs://bucket/run`. Mount the bucket"):
        Checkpoints("gs://bucket/run")


# Other runs


def test_two_runs_in_one_folder_are_refused(tmp_path, first):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="which this process has open"):
            Checkpoints(tmp_path)
        # The refused one did not give up the lock of the first.
        script = f"import eqtrain as et; et.checkpoint.Checkpoints({str(tmp_path)!r})"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert f"which process {os.getpid()} on " in other.stderr
        checkpoints.save(first)
        checkpoints.wait()
        # Reading is allowed meanwhile.
        assert int(restore(tmp_path, first).step) == 0
    Checkpoints(tmp_path).close()


# Files that are not as they were written


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, first: et.TrainState) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(at(first, 5))
    return folder


def files(folder: Path) -> list[Path]:
    """The files of a checkpoint by their relative paths, but for Orbax's own marks of the end."""
    return sorted(
        path.relative_to(folder)
        for path in (folder / "5").rglob("*")
        if path.is_file() and path.parent != folder / "5"
    )


def test_every_changed_bit_is_found_and_its_file_named(tmp_path, whole, first):
    damaged = tmp_path / "run"
    shutil.copytree(whole, damaged)
    assert len(files(damaged)) > 8
    for relative in files(damaged):
        path = damaged / relative
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 4
        for bad in (bytes(changed), content[:-1], b""):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError) as error:
                restore(damaged, first)
            assert str(path) in str(error.value)
        path.unlink()
        with pytest.raises(CheckpointError, match="which is missing") as error:
            restore(damaged, first)
        assert str(path) in str(error.value)
        path.write_bytes(content)
    restore(damaged, first)


def test_orbax_alone_takes_changed_numbers_as_they_are(tmp_path):
    # Negative control: why there are checksums.
    tree = {"big": jnp.asarray(BIG)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "plain", args=ocp.args.PyTreeSave(tree))
        largest = max((tmp_path / "plain").rglob("*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(bytes(content))
        arguments = {"big": ocp.RestoreArgs(restore_type=np.ndarray)}
        read = checkpointer.restore(
            tmp_path / "plain", args=ocp.args.PyTreeRestore(tree, restore_args=arguments)
        )["big"]
    assert np.sum(np.asarray(read) != BIG) == 1


def test_checksums_are_those_of_sha256sum(whole):
    if shutil.which("sha256sum") is None:
        pytest.skip("There is no sha256sum here.")
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=whole / "5", check=True
    )


def test_an_earlier_one_is_used_when_the_damaged_one_is_deleted(tmp_path, whole, first):
    damaged = tmp_path / "run"
    shutil.copytree(whole, damaged)
    with Checkpoints(damaged) as checkpoints:
        checkpoints.save(at(checkpoints.restore(first), 6))
    (damaged / "6" / "meta" / "metadata.json").write_text("{")
    with Checkpoints(damaged) as checkpoints:
        with pytest.raises(CheckpointError, match="6/meta/metadata.json") as error:
            checkpoints.restore(first)
        assert f"Delete `{damaged / '6'}`" in str(error.value)
        assert int(checkpoints.restore(first, step=5).step) == 5


# Steps that failed


def test_nothing_is_saved_from_a_failed_step_on(tmp_path):
    def loss(model, state, batch, key):
        return et.mean(jnp.log(batch["x"]) * model), state, {}

    def batch(x: float) -> dict[str, np.ndarray]:
        return {"x": np.full(2, x, np.float32)}

    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(nonfinite="raise"), et.donate)
    ts = step.init(lambda key: jnp.ones(()), key=jax.random.key(0))
    with Checkpoints(tmp_path) as checkpoints:
        ts, _ = step(ts, batch(1.0))
        checkpoints.save(ts, program=step)
        ts, _ = step(ts, batch(-1.0))
        with pytest.raises(ValueError, match="no program to ask"):
            checkpoints.save(ts)
        with pytest.raises(et.NonFiniteError, match="were not finite") as error:
            checkpoints.save(ts, program=step)
        # What it hands out can be saved, after a step that is a good one.
        assert error.value.state is not None
        ts, _ = step(error.value.state, batch(1.0))
        checkpoints.save(ts, program=step)
    assert steps_in(tmp_path) == [1, 2]


# What is said beside the arrays


def test_metadata_is_read_without_devices(tmp_path):
    step, loader = program(8, "tree"), make_loader()
    ts, _ = run(step, init(step), loader, 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(ts, loader, metrics={"loss": 0.5, "error": et.mean(jnp.ones(2))})
        checkpoints.wait()
        with pytest.raises(FileNotFoundError):
            checkpoints.metadata(7)
    found = read_metadata(tmp_path)
    assert (found.step, found.position, found.mesh) == (1, 8, {"data": 8})
    assert found.metrics == {"loss": 0.5, "error": 1.0}
    assert found.versions["jax"] == jax.__version__ and found.order["seed"] == 4
    leaves = {leaf.name: leaf for leaf in found.leaves}
    assert set(leaves) == set(ts.structure.names)
    assert leaves["model.fixed.table"].kind == "bfloat16[8,3]"
    assert leaves["model.fixed.table"].spec == (("data",),)
    assert leaves["key"].key == str(jax.random.key_impl(ts.key))
    script = f"""
import sys
import eqtrain as et
found = et.checkpoint.read_metadata({str(tmp_path)!r})
assert "orbax" not in sys.modules
print(found.leaves[0], et.checkpoint.metadata.__name__)
import jax
try:
    jax.devices()
except RuntimeError:
    print("no devices")
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(found.leaves[0]) in result.stdout and "no devices" in result.stdout


def test_leaves_of_one_name_are_refused(tmp_path):
    def loss(model, state, batch, key):
        return et.mean(batch["x"] * model["a"]["b"]), state, {}

    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.donate)
    ts = step.init(
        lambda key: {"a": {"b": jnp.ones(())}, "a.b": jnp.ones(())}, key=jax.random.key(0)
    )
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="`model.a.b`"):
        checkpoints.save(ts)


def test_a_template_of_the_same_run_is_enough(tmp_path, first):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first)
        checkpoints.wait()
        ts = checkpoints.restore(program().init_shapes(make))
    assert different(copies(ts), copies(first)) == []


def test_every_file_is_on_disk_before_its_folder_has_its_name(tmp_path, first, monkeypatch):
    """A rename that overtakes the bytes leaves a checkpoint of holes after a power cut."""
    synced: set[int] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if not (tmp_path / "5").exists():
            synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(first, 5))
        checkpoints.wait()
    files = [path for path in (tmp_path / "5").rglob("*") if path.is_file()]
    # What says that the save is complete comes after the name.
    late = {path.name for path in files if path.stat().st_ino not in synced}
    assert len(files) > 3 and late <= {"_CHECKPOINT_METADATA", "commit_success.txt"}
