"""Giving memory back to the system.

XLA's compiler frees what it used, but glibc keeps the pages: hundreds of MB after the
programs of an engine, tens after every new shape of a training job.
"""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Return freed pages to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
