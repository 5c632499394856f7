"""Kernels of Paddle's MKL for matrix products on AMD CPUs.

MKL looks at the CPU's maker instead of its features. On AMD it takes its slowest kernels, two to three times slower
than those for AVX2 (docs/evidence/generation.md). An environment variable selects the AVX2 kernels. MKL reads it once,
without any check.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

VARIABLE, AVX2_KERNELS = "MKL_DEBUG_CPU_TYPE", "5"
_AMD = 2
_AVX2, _FMA = 1 << 10, 1 << 14


def choose_kernels(environment: MutableMapping[str, str]) -> None:
    """Select the AVX2 kernels if they are faster, unless ``environment`` has a value of the user's.

    Only for a process of the command, before Paddle is imported: hal must not change the environment of a library's
    user.
    """
    if VARIABLE not in environment and are_faster():
        environment[VARIABLE] = AVX2_KERNELS


def kernels_note(environment: Mapping[str, str]) -> str:
    """Return the note for ``-v``; "" if the variable is not set."""
    value = environment.get(VARIABLE)
    if value == AVX2_KERNELS and are_faster():
        return f"MKL uses its kernels for AVX2 on this AMD CPU ({VARIABLE}={value}; another value of yours is kept)"
    return "" if value is None else f"{VARIABLE}={value} is kept"


def are_faster() -> bool:
    """Return whether this is an AMD CPU with AVX2 and FMA.

    libgcc has the answer from the CPUID instruction (``__builtin_cpu_supports`` reads the same). Under an emulator that
    is right too, while ``/proc/cpuinfo`` shows the host's CPU. False without libgcc or its symbol.
    """
    try:
        library = ctypes.CDLL("libgcc_s.so.1")
        find = ctypes.CDLL(None).dlvsym  # the symbol has a version, and a search without one does not find it
    except (OSError, AttributeError):
        return False
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    address = find(library._handle, b"__cpu_model", b"GCC_4.8.0")
    if address is None:
        return False
    maker, _, _, features = (ctypes.c_uint * 4).from_address(address)
    return maker == _AMD and features & _AVX2 != 0 and features & _FMA != 0
