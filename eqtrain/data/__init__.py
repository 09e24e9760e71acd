"""Batches whose rows are a pure function of a seed and a position, and prefetch to devices."""

from .bucket import Buckets as Buckets
from .bucket import bucket as bucket
from .loader import Batches as Batches
from .loader import Loader as Loader
from .mix import Mixture as Mixture
from .mix import mix as mix
from .pack import Packed as Packed
from .pack import pack as pack
from .prefetch import Prefetch as Prefetch
from .prefetch import prefetch as prefetch
from .ragged import Padding as Padding
from .resumable import Resumable as Resumable
from .source import RowSource as RowSource
from .stack import stack as stack
from .workers import Workers as Workers
