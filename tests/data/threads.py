"""What tests of threads share."""

import threading
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 seconds"
        time.sleep(0.002)


def readers(name: str = "eqtrain-") -> list[threading.Thread]:
    """The threads whose names begin so."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]
