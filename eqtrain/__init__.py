"""eqtrain: one pure loss, and transforms that turn it into a compiled, sharded train step."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import random as random
from .levels import Contribute as Contribute
from .levels import Loss as Loss
from .levels import LossScaling as LossScaling
from .levels import OrderError as OrderError
from .levels import pipe as pipe
from .metrics import Max as Max
from .metrics import Mean as Mean
from .metrics import Min as Min
from .metrics import Sum as Sum
from .metrics import collapse as collapse
from .metrics import fetch as fetch
from .metrics import mean as mean
from .metrics import merge as merge
from .paths import matching as matching
from .compiled import DonationWarning as DonationWarning
from .compiled import RecompilationError as RecompilationError
from .compiled import RecompilationWarning as RecompilationWarning
from .contribution import Contribution as Contribution
from .convolution import convolve as convolve
from .inspect import Inspection as Inspection
from .preemption import Preempted as Preempted
from .preemption import Preemption as Preemption
from .products import matmul as matmul
from .program import Program as Program
from .random import dropout as dropout
from .random import example_keys as example_keys
from .random import fold_axis as fold_axis
from .sharding.lazy import gather as gather
from .sharding.mesh import ThreadsWarning as ThreadsWarning
from .sharding.mesh import mesh as mesh
from .sharding.placement import fsdp as fsdp
from .sharding.placement import replicate as replicate
from .sharding.placement import rules as rules
from .sharding.report import PlacementReport as PlacementReport
from .state import TrainState as TrainState
from .state import UsedStateError as UsedStateError
from .spikes import Spike as Spike
from .step import CheckError as CheckError
from .step import NonFiniteError as NonFiniteError
from .step import ReplicasError as ReplicasError
from .step import Step as Step
from .step import StepError as StepError
from .trips import Trip as Trip
from .transforms.accumulate import accumulate as accumulate
from .transforms.compile import donate as donate
from .transforms.compile import jit as jit
from .transforms.ema import ema as ema
from .transforms.evaluate import Evaluation as Evaluation
from .transforms.evaluate import evaluate as evaluate
from .transforms.guard import guard as guard
from .transforms.precision import precision as precision
from .transforms.remat import remat as remat
from .transforms.repeat import repeat as repeat
from .transforms.shard import shard as shard
from .transforms.update import update as update
from .transforms.value_and_grad import value_and_grad as value_and_grad

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import data as data
    from . import interop as interop

_IMPORTED_WHEN_USED = ("checkpoint", "data", "interop")


def __getattr__(name: str) -> _Any:
    # A quarter of the time that the import would take.
    if name in _IMPORTED_WHEN_USED:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_WHEN_USED})
