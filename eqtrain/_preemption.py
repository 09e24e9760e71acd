"""A signal that asks a run to end, taken at a step that all processes agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Preempted(SystemExit):
    """Ends the process with exit code 75: it was asked to end, and can be started again.

    75 is EX_TEMPFAIL of sysexits.h, "try again later". It passes through `with` blocks like every
    exception, so that checkpoints are waited for.
    """

    EXIT_CODE = 75

    def __init__(self) -> None:
        super().__init__(self.EXIT_CODE)


class Preemption:
    """Takes notice of signals, for loops to look at between steps.

    While it is entered, the signals do no more than that; afterwards what they did before is put
    back. One can be looked at in any loop: of warm-up, training or evaluation.

    In several processes all of them have to look equally often, in whichever loops: each look asks
    all processes, by a reduction of one number, whether one of them got a signal, and gives the
    answer of the look before. So all see the same at the same look, and the devices never wait for
    Python.

    **Arguments:**

    - `signals`: SIGTERM, which Kubernetes and `scancel` send, and SIGUSR1, for
        `sbatch --signal=USR1@120`, unless given.

    ```python
    >>> import os, signal
    >>> with et.Preemption() as preemption:
    ...     before = preemption.poll()
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     before, preemption.poll()
    (False, True)

    ```
    """

    def __init__(self, signals: Sequence[int] | None = None):
        if signals is None:
            # By name, since not every system has the second.
            usual = (getattr(signal, name, None) for name in ("SIGTERM", "SIGUSR1"))
            signals = [number for number in usual if number is not None]
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._received = False
        self._agreed = False
        self._ask = _asker() if jax.process_count() > 1 else None
        self._asked: Any = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Signals are received by the main thread of Python. "
                f"Got thread {threading.current_thread().name!r}. Enter `et.Preemption` in it."
            )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None stands for one that was not set from Python and cannot be from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def poll(self) -> bool:
        """Whether the run is to end: save, and `raise et.Preempted`. It stays so."""
        if self._ask is None:
            return self._received
        if not self._agreed:
            before, self._asked = self._asked, self._ask(self._received)
            # Dispatched a step ago, so that it is there by now, or soon.
            self._agreed = before is not None and bool(np.asarray(before.addressable_data(0)))
        return self._agreed


def _asker() -> Callable[[bool], jax.Array]:
    """Dispatches the question to all processes, by one device of each."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = np.array([first[index] for index in sorted(first)], dtype=object)
    mesh = Mesh(devices, ("process",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("process"))
    anyone = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, P()))

    def ask(received: bool) -> jax.Array:
        return anyone(jax.make_array_from_process_local_data(split, np.array([received])))

    return ask
