"""Arrays by name, to a folder and back: what Orbax does, and the checksums it leaves out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._util.extras import extra
from .integrity import SUMS, checksum_lines, files_in, write_synced
from .metadata import FILE, META

STATE = "state"
# How Orbax names the folder of a save that has not come to its end.
UNFINISHED = ".orbax-checkpoint-tmp"


def orbax() -> ModuleType:
    """Orbax, imported when it is first used. **Raises:** `ImportError` that names the extra."""
    return extra("orbax.checkpoint", "checkpoint", "Checkpoints are written and read by Orbax.")


class Writer:
    """Saves in the background, and moves a checkpoint to its name when it is whole.

    That is Orbax's AsyncCheckpointer, of which all processes make one together.
    """

    def __init__(self) -> None:
        self._ocp = orbax()
        handler, self._args = _handler()
        # Weights hardly get smaller by compression, which takes longer than to write them.
        arrays = self._ocp.PyTreeCheckpointHandler(use_compression=False)
        self._checkpointer = self._ocp.AsyncCheckpointer(
            handler(
                **{
                    STATE: arrays,
                    META: self._ocp.JsonCheckpointHandler(filename=FILE),
                }
            )
        )

    def start(self, path: Path, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        """Begins to write. The arrays may be donated as soon as it returns.

        On a CPU what is held is a view of them, which turns the donation of the very next step into
        a copy. So nothing is copied by us.
        """
        args = self._ocp.args
        save = self._args(**{STATE: args.PyTreeSave(arrays), META: args.JsonSave(meta)})
        self._checkpointer.save(path, args=save)

    def wait(self) -> None:
        """Waits for the end. **Raises:** whatever went wrong, once."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        self._checkpointer.close()


def read_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Reads arrays by name, each with its sharding: no device ever holds more than its shard.

    One without a sharding comes to the default device and is not committed to it, as is what a
    program without a mesh returns; else the step would be compiled anew for it.
    """
    ocp = orbax()
    arguments = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if aval.sharding is None
        else ocp.ArrayRestoreArgs(sharding=aval.sharding, global_shape=aval.shape, dtype=aval.dtype)
        for name, aval in wanted.items()
    }
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        arrays = checkpointer.restore(
            path / STATE,
            args=ocp.args.PyTreeRestore(dict(wanted), restore_args=arguments),
        )
    finally:
        checkpointer.close()
    # Copies, since a device array on a CPU may share the memory of NumPy's, which is not donated.
    return {
        name: jnp.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
        for name, leaf in arrays.items()
    }


@functools.cache
def _handler() -> tuple[type, type]:
    """Orbax's handler of several items with checksums, and the type of its arguments."""
    ocp = orbax()

    class Hashed(ocp.future.Future):
        """Done when this process's files are on disk and their checksums beside them."""

        def __init__(self, writes: list[Any], folder: Path):
            self._writes = writes
            self._folder = folder

        def result(self, timeout: float | None = None) -> None:
            for write in self._writes:
                write.result(timeout)
            process = jax.process_index()
            paths = files_in(self._folder / STATE / f"ocdbt.process_{process}")
            lines = checksum_lines(self._folder, paths)
            write_synced(self._folder / f"{SUMS}.{process}", "\n".join(lines))

    class Handler(ocp.CompositeCheckpointHandler):
        async def async_save(self, directory: Any, args: Any) -> list[Any]:
            writes = await super().async_save(directory, args)
            return [Hashed(writes or [], Path(directory))]

        def finalize(self, directory: Any) -> None:
            """Runs on one process when all have written, before the folder gets its name."""
            super().finalize(directory)
            folder = Path(directory)
            lines = []
            for part in sorted(folder.glob(f"{SUMS}.*")):
                lines += part.read_text(encoding="utf-8").splitlines()
                part.unlink()
            known = {line.split("  ", 1)[1] for line in lines}
            paths = [
                path
                for path in (*files_in(folder / STATE), *files_in(folder / META))
                if path.relative_to(folder).as_posix() not in known
            ]
            lines += checksum_lines(folder, paths)
            write_synced(folder / SUMS, "\n".join(sorted(lines)) + "\n")

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    class Arguments(ocp.args.Composite):
        pass

    return Handler, Arguments
