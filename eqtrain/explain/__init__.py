"""Names the operation that a step's first NaN or infinity came from, and what went into it."""

from .blame import Fault as Fault
from .blame import all_faults as all_faults
from .blame import first_fault as first_fault
from .explanation import Explanation as Explanation
from .explanation import describe as describe
from .explanation import render as render
from .plan import Site as Site
from .probe import statistics as statistics
from .record import Flags as Flags
from .rows import RowBlame as RowBlame
from .rows import blame_rows as blame_rows
from .tensors import Indices as Indices
from .tensors import Statistics as Statistics
from .tensors import Tensor as Tensor
from .watch import watch as watch
