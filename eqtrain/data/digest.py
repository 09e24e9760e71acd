"""Long settings as one number, to be compared."""

from __future__ import annotations

import hashlib


def digest(data: bytes) -> int:
    """A whole number below 2**128 that other bytes have another one of."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")
