"""The parts of JAX and Equinox in use that have no public name, all of them.

`tests/test_internals.py` has a test for each, which fails by its name where a version of JAX has it
no longer. How equations of a jaxpr are read stands in `_jaxpr/jaxprs.py`, and what the text of a
compiled program looks like in `_programs/cost.py`; both are tested there with what JAX makes.
"""

from __future__ import annotations

from typing import Any

# The primitive that `checkify.check` binds, JAX's rule for it under `vmap`, and the effect by which
# a jaxpr says that it holds one.
from jax._src.checkify import ErrorEffect as ErrorEffect
from jax._src.checkify import check_batching_rule as check_batching_rule
from jax._src.checkify import check_p as check_p

# With which an equation is bound again in the place in the user's code that made it.
from jax._src.source_info_util import current_name_stack as current_name_stack
from jax._src.source_info_util import user_context as user_context

# What JAX says of a check that nobody looks at, and of arrays on several sets of devices.
NOT_FUNCTIONALIZED = "not functionalized"
INCOMPATIBLE_DEVICES = "incompatible devices"


def cache_size(jitted: Any) -> int:
    """How many programs a jitted function has compiled."""
    return jitted._cache_size()


def error_text(error: Any) -> str:
    """The message of a check that failed; as it was written where its values do not fit in."""
    try:
        return str(error)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        return error.fmt_string


def described(error: Any, payload: Any) -> Any:
    """The exception that the only check of a `checkify.Error` would raise."""
    [tree] = error._metadata.values()
    return tree.unflatten(payload)


def payload_of(error: Any) -> Any:
    """What the only check of a `checkify.Error` was given."""
    [payload] = error._payload.values()
    return payload


def failed(error: Any) -> list[Any]:
    """Of each check of a `checkify.Error`, whether it failed."""
    return list(error._pred.values())
