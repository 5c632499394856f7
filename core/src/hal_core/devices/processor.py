"""Features of the host's processor that Paddle needs, found without importing Paddle."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import numpy as np

from ..errors import Unavailable

X86 = "SSE2"
"""NumPy's name for a feature of every x86-64 processor and no other."""


@cache
def processor_features() -> frozenset[str]:
    """Return the features of this processor, by NumPy's names.

    NumPy reads them with the CPUID instruction, which an emulator answers for the emulated processor. ``/proc/cpuinfo``
    shows the host's there.
    """
    core = "numpy.core" if np.__version__.startswith("1.") else "numpy._core"
    found = import_module(f"{core}._multiarray_umath").__cpu_features__
    return frozenset(name for name, has in found.items() if has)


def lacks_for_paddle() -> str:
    """Return the feature without which ``import paddle`` ends the process with SIGILL, if this CPU lacks it; else "".

    Paddle's libraries for x86-64 are compiled for AVX2, and the first of them uses it while it is loaded.
    """
    features = processor_features()
    return "AVX2" if X86 in features and "AVX2" not in features else ""


def check_processor() -> None:
    """Raise :class:`Unavailable` if Paddle cannot be imported on this CPU."""
    if lacking := lacks_for_paddle():
        raise Unavailable(
            f"Paddle cannot be imported: this CPU has no {lacking}",
            cure="use an x86 CPU from Haswell (Intel, 2013) or Excavator (AMD, 2015) on; in a virtual machine, "
            "have it show the host's CPU model",
        )
