"""Keys that belong to examples, and dropout that a mesh or a microbatch cannot change.

Example i of the *global* batch at step s has the key `fold_in(fold_in(key, s), i)`, wherever it is
computed. All that is random about an example is drawn from its own key, so the same numbers come
out on one device and on many, and under any accumulation.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


def example_keys(
    key: Shaped[Array, "..."], step: int | Int[Array, ""], index: Int[Any, "..."]
) -> Shaped[Array, "..."]:
    """Makes the key of each example: `fold_in(fold_in(key, step), i)` for every i of `index`.

    **Arguments:**

    - `key`: one typed key, the same in the whole run.
    - `step`: the step, a number of 32 bits.
    - `index`: where each example stands in the global batch.

    **Returns:** typed keys of the shape of `index`.

    **Raises:** `TypeError` for raw `uint32` keys; `ValueError` if `key` is more than one key.

    ```python
    >>> keys = et.example_keys(jax.random.key(0), step=3, index=jnp.arange(2))
    >>> alone = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), 1)
    >>> bool(keys[1] == alone)
    True

    ```
    """
    _check_key(key)
    if key.shape != ():
        raise ValueError(
            "`example_keys` derives all keys from a single one. "
            f"Got keys of shape {key.shape}. Pass one, such as `key[0]`."
        )
    _check_integer(index)
    index = jnp.asarray(index)
    at_step = fold(key, step)
    keys = jax.vmap(lambda i: jax.random.fold_in(_stable(at_step), i))(index.reshape(-1))
    return _restore(keys, key).reshape(index.shape)


def fold(key: Shaped[Array, "..."], data: int | Int[Any, ""]) -> Shaped[Array, "..."]:
    """Folds a number, such as a layer's index, into every key of an array of any shape.

    **Arguments:**

    - `key`: typed keys.
    - `data`: a number of 32 bits; it may be traced, as in a scan over layers.

    **Returns:** typed keys of the shape of `key`.

    **Raises:** `TypeError` for raw `uint32` keys or data that is no integer; `ValueError` for data
    that is no scalar or does not fit in 32 bits.

    ```python
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> folded = et.random.fold(keys, 7)
    >>> folded.shape, bool(folded[2] == jax.random.fold_in(keys[2], 7))
    ((4,), True)

    ```
    """
    _check_key(key)
    if jnp.shape(data) != ():
        raise ValueError(
            "`fold` folds one number into all keys. "
            f"Got data of shape {jnp.shape(data)}. "
            "For one number a key use `jax.vmap(et.random.fold)`."
        )
    _check_integer(data)
    folded = jax.vmap(lambda k: jax.random.fold_in(k, data))(_stable(key).reshape(-1))
    return _restore(folded, key).reshape(key.shape)


def split(key: Shaped[Array, "..."], num: int = 2) -> tuple[Shaped[Array, "..."], ...]:
    """Splits every key of an array, into `num` arrays of its shape.

    **Raises:** `TypeError` for raw `uint32` keys; `ValueError` for `num` below 1.

    ```python
    >>> attention, mlp = et.random.split(jax.random.split(jax.random.key(0), 4))
    >>> attention.shape, mlp.shape
    ((4,), (4,))

    ```
    """
    _check_key(key)
    num = operator.index(num)
    if num < 1:
        raise ValueError(
            f"`split` makes one array of keys or more. Got num={num}. Pass 1 at least."
        )
    parts = jax.vmap(lambda k: jax.random.split(k, num))(_stable(key).reshape(-1))
    return tuple(_restore(parts[:, i], key).reshape(key.shape) for i in range(num))


def fold_axis(key: Shaped[Array, "..."], *axis_names: str) -> Shaped[Array, "..."]:
    """Folds the device's index along mesh axes into every key.

    For axes that split an *example*, such as "seq": without it, every part of an example would draw
    the same mask. What is drawn then depends on how many parts there are. Axes that split the batch
    need none of this, since their examples have keys of their own, and axes along which activations
    are replicated must not have it.

    Outside `shard_map` an axis splits nothing, and counts as an axis of one device: the keys are
    those of index 0.

    **Raises:** `TypeError` for raw `uint32` keys; `ValueError` inside a `shard_map` over a mesh
    that has no such axis, which is more often a misspelling than not.

    ```python
    >>> key = jax.random.key(0)
    >>> bool(et.fold_axis(key, "seq") == jax.random.fold_in(key, 0))
    True

    ```
    """
    _check_key(key)
    for name in axis_names:
        try:
            index = jax.lax.axis_index(name)
        except NameError:  # the documented way to learn that an axis is not bound
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.manual_axes and name not in mesh.axis_names:
                raise ValueError(
                    "Inside `shard_map`, `fold_axis` takes axes of the mesh. "
                    f"Got {name!r}, where the mesh has {', '.join(map(repr, mesh.axis_names))}. "
                    "Correct the name, or give the mesh that axis with size 1."
                ) from None
            index = 0
        key = fold(key, index)
    return key


def dropout(
    x: Float[Array, "..."], rate: float | int, *, key: Shaped[Array, "..."] | None
) -> Float[Array, "..."]:
    """Sets elements of `x` to 0 with probability `rate`, and scales the others by `1 / (1 - rate)`.

    The mask is a hash of the key and of the element's index within its example: some twenty integer
    operations an element that XLA fuses into what stands around them, where threefry costs more
    than the matrix products nearby on a CPU. The backward pass computes the mask again, and keeps
    nothing for it but the words of the keys.

    **Arguments:**

    - `x`: activations of any floating dtype, which the result has too. They are scaled in float32
        at least, since 1 / 0.9 as a bfloat16 would shift their mean by 0.16%.
    - `rate`: a Python float in [0, 1), rounded to a multiple of 2**-32. At 0 nothing is computed.
    - `key`: typed keys whose shape is the first dims of that of `x`, one an example, or a single
        one inside `jax.vmap`: both give the same mask. Use a key for one mask only, see `fold` and
        `split`. With None, as at inference, `x` comes back as it is.

    **Raises:** `TypeError` for raw `uint32` keys, or what is not floating; `ValueError` for a rate
    outside [0, 1), a shape of keys that is no prefix of that of `x`, or examples of more than 2**32
    elements.

    The hash is Wellons' 32-bit finaliser "lowbias32", applied twice with a word of the mixed key
    before each. How random it looks: `tests/test_random.py` finds masks of examples, steps, layers
    and neighbouring elements independent, and each bit of key and index to flip half of the hash's
    bits. Of the diehard, STS and rgb tests of dieharder 3.31, on the hashes for keys 0, 1, 2, ...,
    105 passed and 1 was "weak" with 4,096 elements a key, 89 and 1 with one element a key (as many
    as by chance); none failed. Its dab tests but one, TestU01 and PractRand were not run. For one
    key the hash is one to one, so the number kept of n elements has 1 - n / 2**32 times the
    variance that it would have if they were independent. It is no cryptographic generator.

    **Reference:** https://nullprogram.com/blog/2018/07/31/

    ```python
    >>> key = jax.random.split(jax.random.key(0), 2)
    >>> print(et.dropout(jnp.ones((2, 4)), 0.5, key=key))
    [[0. 2. 0. 0.]
     [0. 2. 2. 0.]]

    ```
    """
    threshold = _threshold(rate)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            "`dropout` scales what it keeps, so that `x` must be of a floating dtype. "
            f"Got {x.dtype}. Cast it first."
        )
    if key is None:
        return x
    _check_key(key)
    if key.shape != x.shape[: key.ndim]:
        raise ValueError(
            "The shape of `key` must be the first dims of that of `x`. "
            f"Got keys of shape {key.shape} and x of shape {x.shape}. "
            "Pass one key an example, or a single one inside `jax.vmap`."
        )
    elements = math.prod(x.shape[key.ndim :])
    if elements > 2**32:
        raise ValueError(
            "`dropout` counts the elements of an example in 32 bits. "
            f"Got {elements} elements a key, with keys of shape {key.shape} and x of shape "
            f"{x.shape}. Use keys for more of the dims."
        )
    if threshold == 0:
        return x
    apply = functools.partial(_apply_dropout, threshold=threshold, scale=1 / (1 - rate))
    # Rematerialised, so that a scan over layers stacks the words of the keys and not the masks. XLA
    # may still share a mask between the passes: without the barrier against that it fuses more.
    return jax.checkpoint(apply, prevent_cse=False)(x, jax.random.key_data(key))


def _threshold(rate: float | int) -> int:
    """Hashes below this number are dropped: `rate * 2**32`, rounded once."""
    if not isinstance(rate, float | int):  # nor is a traced number
        raise TypeError(
            "The rate of `dropout` must be a Python number, since at 0 the mask is left out. "
            f"Got {type(rate).__name__}. Make it a static field of the model."
        )
    # Times a power of two is exact. A NaN fails the comparison.
    threshold = round(rate * 2**32) if 0 <= rate < 1 else 2**32
    if threshold == 2**32:
        raise ValueError(
            f"The rate of `dropout` must be in [0, 1). Got {rate}. Use the share that is set to 0."
        )
    return threshold


def _apply_dropout(
    x: Float[Array, "..."], words: Shaped[Array, "..."], *, threshold: int, scale: float
) -> Float[Array, "..."]:
    keep = _hash(words, x.shape) >= jnp.uint32(threshold)
    wide = x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32
    return jnp.where(keep, x.astype(wide) * scale, 0).astype(x.dtype)


def _hash(words: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """32 bits for each element of `shape`, from the words of its key and its index below that."""
    lead = words.ndim - 1
    ones = (1,) * lead
    index, stride = jnp.zeros(ones + shape[lead:], jnp.uint32), 1
    for dim in reversed(range(lead, len(shape))):
        # The wrap-around at 2**32 is never reached: `elements` is checked.
        position = jax.lax.broadcasted_iota(jnp.uint32, index.shape, dim)
        index = index + position * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    first, second = (
        word.reshape(word.shape + (1,) * (len(shape) - lead)) for word in _two_words(words)
    )
    return _finalise(_finalise(index ^ first) ^ second)


def _two_words(words: Shaped[Array, "..."]) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Mixes the words of a key into two, each of which depends on all.

    Three rounds of a Feistel network a pair, hence one to one for keys of two words. The four words
    of an "rbg" key are often two words twice, and would cancel out if they were only xored.
    """
    first = second = jnp.zeros(words.shape[:-1], jnp.uint32)
    for i in range(0, words.shape[-1], 2):
        first = first ^ words[..., i]
        if i + 1 < words.shape[-1]:
            second = second ^ words[..., i + 1]
        # Fractional digits of the golden ratio and of the square roots of 3 and 5.
        first = first ^ _finalise(second + jnp.uint32(0x9E3779B9))
        second = second ^ _finalise(first + jnp.uint32(0xBB67AE85))
        first = first ^ _finalise(second + jnp.uint32(0x3C6EF372))
    return first, second


def _finalise(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Wellons' lowbias32: a permutation of 32-bit words whose avalanche is close to ideal."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _check_key(key: Any) -> None:
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        got = f"dtype {key.dtype}" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(
            "Keys must be typed, as `jax.random.key` makes them. "
            f"Got {got}. Wrap a raw key: `jax.random.wrap_key_data(key)`."
        )


def _check_integer(data: Any) -> None:
    if not jnp.issubdtype(jnp.result_type(data), jnp.integer):
        raise TypeError(
            "What is folded into a key must be an integer. "
            f"Got {jnp.result_type(data)}. Use the index of what the key is for."
        )
    if not isinstance(data, jax.Array) and np.size(data):
        low, high = int(np.min(data)), int(np.max(data))
        if low < 0 or high >= 2**32:
            raise ValueError(
                "What is folded into a key must fit in 32 bits without a sign. "
                f"Got {low if low < 0 else high}. Use an index that does, or fold twice."
            )


def _stable(key: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same words as keys that `vmap` derives the same from, whatever stands beside them.

    With "unsafe_rbg", what `vmap(fold_in)` gives an example depends on the others in the batch, and
    so on the mesh. Its words are read as an "rbg" key, which derives keys by threefry.
    """
    if str(jax.random.key_impl(key)) == "unsafe_rbg":
        return jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg")
    return key


def _restore(key: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Undoes `_stable`."""
    if key.dtype == like.dtype:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(like))
