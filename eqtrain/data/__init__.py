"""Batches whose rows are a pure function of a seed and a position, and prefetch to devices."""

from .loader import Batches as Batches
from .loader import Loader as Loader
from .loader import Resumable as Resumable
from .prefetch import Prefetch as Prefetch
from .prefetch import prefetch as prefetch
from .source import RowSource as RowSource
from .stack import stack as stack
