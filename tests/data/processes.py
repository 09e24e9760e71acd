"""Runs one script in two processes that know each other, with two CPU devices each."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import eqtrain

START = """
import sys
import jax, numpy as np
index = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=index)
"""


def run_two(script: str, limit: float = 60) -> list[str]:
    """What each has printed. Fails if one fails, or if they are not done within `limit` seconds."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(Path(eqtrain.__file__).parents[1]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + textwrap.dedent(script), address, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    deadline = time.monotonic() + limit
    try:
        outputs = [
            process.communicate(timeout=deadline - time.monotonic())[0] for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs
