"""Weights from other frameworks, and back to them, by rules.

A list of rules maps names to names and dims to dims. It is written once for a model, beside it, and
read in both directions: `load` fills a model, and `export` gives tensors under their old names.
What no rule covers is an error that names it, unless it is said to be left out.
"""

from .convert import Report as Report
from .convert import compare as compare
from .convert import export as export
from .convert import load as load
from .files import read as read
from .files import write as write
from .rules import Rule as Rule
from .rules import prefixed as prefixed
from .rules import rule as rule
