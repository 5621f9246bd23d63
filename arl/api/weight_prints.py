"""Fingerprints of weights, with which others can be compared: a few numbers for each tensor."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """The fingerprint of a tensor x. b_i are the bits of element i, k_i fixed pseudo-random odd numbers, s_i signs.

    All three are sums over elements, so they do not depend on how ranks share the tensor; the norm and the projection
    but for float rounding.
    """

    bits: int
    """sum(k_i b_i) modulo 2^64: equal for equal tensors, and hardly ever for others."""
    norm: float
    """The L2 norm."""
    projection: float
    """sum(s_i x_i). The difference of two tensors' projections is about as large as the norm of their difference."""


def digest_of(prints: Mapping[str, TensorPrint]) -> str:
    """16 hexadecimal digits: equal for equal weights. prints: by the tensors' names."""
    digest = hashlib.sha256()
    for name, one in sorted(prints.items()):
        digest.update(name.encode() + struct.pack("<xQ", one.bits))
    return digest.hexdigest()[:16]
