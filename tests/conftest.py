"""Makes every test strict: eight CPU devices, no silent promotion, annotations checked at run time.

The environment has to be set before JAX is imported, and the import hook before `eqtrain` and
`models` are, so the order of the lines below matters.
"""

import atexit
import functools
import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two test processes share what may be two cores: one thread a device is already more than enough.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# More threads than devices, or collectives could wait for one another for ever; see `et.mesh`.
os.environ.setdefault("NPROC", "16")
_XLA_FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_cpu_multi_thread_eigen=false"]
# Small programs are compiled in one piece: to split them costs more than a second thread gives.
_XLA_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
# On JAX 0.10, without XLA's newer way to make code of fusions, compiling takes half the processor's
# time. Roundings differ by it, so that tests of bits and of roundings, which are marked `codegen`,
# run as XLA compiles by default, in a process of their own: `tests/test_codegen.py`.
BY_DEFAULT = "EQTRAIN_TESTS_COMPILE_BY_DEFAULT"
QUICK_CODEGEN = BY_DEFAULT not in os.environ and version("jax").startswith("0.10.")
if QUICK_CODEGEN:
    _XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]).strip()
# What one test compiled, no other compiles again, in this process or the next: a quarter of the
# time. The folder lives as long as the run, and the first process, from which the others have its
# name, deletes it. The key has the metadata, since tests read names from the text of a program.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="compiled-for-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import PRNGKeyArray, install_import_hook  # noqa: E402

import tests.type_checker  # noqa: E402, F401

# What JAX traces and caches lives on, and to walk through it every 700 objects was a tenth.
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `function` promote dtypes as JAX does unless told otherwise."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapped


def _new_optimizer(cls: type, init: Callable[..., Any], update: Callable[..., Any]) -> Any:
    return tuple.__new__(cls, (_loosely(init), _loosely(update)))


# optax 0.2.8 itself raises `float ** int32` in the bias correction of Adam and in cosine schedules,
# which strict promotion refuses. Only what runs inside an optimizer is exempt; our code is not.
optax.GradientTransformation.__new__ = _new_optimizer  # pyright: ignore[reportAttributeAccessIssue]

install_import_hook(["eqtrain", "models"], "tests.type_checker.check")

from eqtrain._programs.dispatch import Compiled  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="I/N", help="only the I-th of N parts of the tests, from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a process of its own, and with `--slice` all but a part of the tests.

    The part is chosen by names: it is the same in every process and run.
    """
    kept = items[:]
    if QUICK_CODEGEN:
        kept = [item for item in kept if item.get_closest_marker("codegen") is None]
    if given := config.getoption("--slice"):
        index, parts = map(int, given.split("/"))
        kept = [item for item in kept if zlib.crc32(item.nodeid.encode()) % parts == index % parts]
    names = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = kept


class _GetKey:
    """Returns a new key a call, the same ones in the same order in every run of a test."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> PRNGKeyArray:
        self._count += 1
        return jax.random.fold_in(jax.random.key(0), self._count)


@pytest.fixture
def getkey() -> _GetKey:
    return _GetKey()


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Frees what was compiled, at the end of a module, before Linux ends the process for it.

    JAX 0.12 maps memory for each compiled program, a hundred times a test, and a process may have
    65,530 mappings. Programs that live on, for the modules that share them, begin anew.
    """
    yield
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if maps.exists() and len(maps.read_bytes().splitlines()) > int(limit.read_text()) // 3:
        # Not `isinstance`, which asks objects of others what they are, and some of those raise.
        for program in [it for it in gc.get_objects() if type(it) is Compiled]:
            program._jits.clear()
            program._signatures.clear()
            program._allowed.clear()
        jax.clear_caches()
