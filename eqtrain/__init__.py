"""eqtrain: one pure loss, and transforms that turn it into a compiled, sharded train step."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# Transforms, from the loss outward.
from ._transforms.precision import precision as precision
from ._transforms.remat import remat as remat
from ._transforms.accumulate import accumulate as accumulate
from ._transforms.shard import shard as shard
from ._transforms.update import update as update
from ._transforms.ema import ema as ema
from ._transforms.guard import guard as guard
from ._transforms.repeat import repeat as repeat
from ._programs.compile import jit as jit
from ._programs.compile import donate as donate
from ._programs.evaluate import evaluate as evaluate
from ._transforms.value_and_grad import value_and_grad as value_and_grad
from ._core.levels import pipe as pipe

# What a loss returns, and what becomes of it.
from ._metrics import mean as mean
from ._metrics import Mean as Mean
from ._metrics import Sum as Sum
from ._metrics import Max as Max
from ._metrics import Min as Min
from ._metrics import fetch as fetch
from ._metrics import merge as merge
from ._metrics import collapse as collapse

# The mesh, and how a model lies on it.
from ._sharding.mesh import mesh as mesh
from ._sharding.placement import replicate as replicate
from ._sharding.placement import fsdp as fsdp
from ._sharding.placement import rules as rules
from ._sharding.lazy import gather as gather

# Inside a model.
from .random import dropout as dropout
from .random import fold_axis as fold_axis
from .random import example_keys as example_keys
from ._ops.matmul import matmul as matmul
from ._ops.convolve import convolve as convolve

# Settings of transforms.
from ._core.levels import LossScaling as LossScaling
from ._guard.spikes import Spike as Spike
from ._util.paths import matching as matching

# Levels, the training state, and what a program says of itself.
from ._core.levels import Loss as Loss
from ._core.levels import Contribute as Contribute
from ._core.contribution import Contribution as Contribution
from ._core.step import Step as Step
from ._programs.program import Program as Program
from ._programs.evaluate import Evaluation as Evaluation
from ._state.train_state import TrainState as TrainState
from ._state.placement_report import PlacementReport as PlacementReport
from ._programs.cost import Inspection as Inspection
from ._guard.trips import Trip as Trip

# A run that is told to end.
from ._preemption import Preemption as Preemption
from ._preemption import Preempted as Preempted

# Errors and warnings.
from ._core.order import OrderError as OrderError
from ._core.errors import StepError as StepError
from ._core.errors import NonFiniteError as NonFiniteError
from ._core.errors import CheckError as CheckError
from ._core.errors import ReplicasError as ReplicasError
from ._state.train_state import UsedStateError as UsedStateError
from ._programs.dispatch import RecompilationError as RecompilationError
from ._programs.dispatch import RecompilationWarning as RecompilationWarning
from ._programs.dispatch import DonationWarning as DonationWarning
from ._sharding.mesh import ThreadsWarning as ThreadsWarning

from . import random as random
from . import rows as rows

if _TYPE_CHECKING:
    from . import bundles as bundles
    from . import checkpoint as checkpoint
    from . import data as data
    from . import explain as explain
    from . import interop as interop

# A quarter of the time that the import would take.
_IMPORTED_WHEN_USED = ("bundles", "checkpoint", "data", "explain", "interop")


def __getattr__(name: str) -> _Any:
    if name in _IMPORTED_WHEN_USED:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_IMPORTED_WHEN_USED, *(name for name in globals() if name[0] != "_")})
