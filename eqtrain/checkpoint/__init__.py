"""Checkpoints of whole TrainStates: asynchronous, atomic, restored on any mesh; and weights alone.

The arrays are written and read by Orbax, the extra `checkpoint`; weights alone by safetensors, the
extra of that name. Neither is imported before it is used.
"""

from .checkpoints import Checkpoints as Checkpoints
from .error import CheckpointError as CheckpointError
from .metadata import Leaf as Leaf
from .metadata import Metadata as Metadata
from .metadata import read_metadata as read_metadata
from .restore import restore as restore
from .weights import export_weights as export_weights
from .weights import read_weights as read_weights
