"""Kernels of Paddle's MKL for matrix products on AMD CPUs, where the model runs in Paddle's operators.

MKL looks at the CPU's maker instead of its features. On AMD it takes its slowest kernels, several times slower than
those for AVX2 or AVX-512 (docs/evidence/generation.md). An environment variable selects others. MKL reads it once,
without any check.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

VARIABLE = "MKL_DEBUG_CPU_TYPE"
_KERNELS = {"7": "AVX-512", "5": "AVX2"}
_AMD = 2
_NEEDED = {"7": (10, 14, 15, 20, 21, 22, 23), "5": (10, 14)}
"""The features, as libgcc numbers them: AVX2, FMA; AVX-512 F, VL, BW, DQ, CD."""


def choose_kernels(environment: MutableMapping[str, str]) -> None:
    """Select the faster kernels, if there are some, unless ``environment`` has a value of the user's.

    Only for a process of the command, before Paddle is imported: hal must not change the environment of a library's
    user.
    """
    if VARIABLE not in environment and (value := faster_kernels()):
        environment[VARIABLE] = value


def kernels_note(environment: Mapping[str, str]) -> str:
    """Return the note for ``-v``; "" if the variable is not set, or Paddle not installed."""
    value = environment.get(VARIABLE) if find_spec("paddle") else None
    if value and value == faster_kernels():
        kernels = f"its kernels for {_KERNELS[value]} on this AMD CPU"
        return f"where Paddle computes, its MKL uses {kernels} ({VARIABLE}={value}; another value of yours is kept)"
    return "" if value is None else f"{VARIABLE}={value} is kept"


def faster_kernels() -> str:
    """Return the variable's value for the fastest kernels that this AMD CPU can run; "" for another maker's CPU, and
    for one without AVX2 and FMA.

    libgcc has the answer from the CPUID instruction (``__builtin_cpu_supports`` reads the same). Under an emulator that
    is right too, while ``/proc/cpuinfo`` shows the host's CPU. "" without libgcc or its symbol.
    """
    try:
        library = ctypes.CDLL("libgcc_s.so.1")
        find = ctypes.CDLL(None).dlvsym  # the symbol has a version, and a search without one does not find it
    except (OSError, AttributeError):
        return ""
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    address = find(library._handle, b"__cpu_model", b"GCC_4.8.0")
    if address is None:
        return ""
    maker, _, _, features = (ctypes.c_uint * 4).from_address(address)
    able = [value for value, needed in _NEEDED.items() if all(features >> bit & 1 for bit in needed)]
    return able[0] if able and maker == _AMD else ""
