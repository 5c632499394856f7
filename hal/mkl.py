"""The kernels that Paddle's MKL uses for matrix products on a CPU of AMD's.

That MKL looks at the maker of the CPU, not at its features: on AMD it takes its slowest kernels, two to three times
slower than those for AVX2 (docs/evidence/generation.md). A variable asks for these. MKL reads it once, and checks
nothing.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

VARIABLE, AVX2_KERNELS = "MKL_DEBUG_CPU_TYPE", "5"
_AMD = 2
_AVX2, _FMA = 1 << 10, 1 << 14


def choose_kernels(environment: MutableMapping[str, str]) -> None:
    """Ask for the AVX2 kernels where they are faster, unless ``environment`` has a value of the user's.

    Only for a process of the command, before Paddle is imported: a library user's environment is not hal's to change.
    """
    if VARIABLE not in environment and are_faster():
        environment[VARIABLE] = AVX2_KERNELS


def kernels_note(environment: Mapping[str, str]) -> str:
    """What the command says of it with ``-v``; "" where the variable is not set."""
    value = environment.get(VARIABLE)
    if value == AVX2_KERNELS and are_faster():
        return f"MKL uses its kernels for AVX2 on this AMD CPU ({VARIABLE}={value}; another value of yours is kept)"
    return "" if value is None else f"{VARIABLE}={value} is kept"


def are_faster() -> bool:
    """Whether this is a CPU of AMD's with AVX2 and FMA.

    libgcc answers, by the CPUID instruction (``__builtin_cpu_supports`` reads the same): right under an emulator too,
    where ``/proc/cpuinfo`` shows the host's CPU. False where there is no such library or no such answer.
    """
    try:
        library = ctypes.CDLL("libgcc_s.so.1")
        find = ctypes.CDLL(None).dlvsym  # the symbol has a version that a search without one passes over
    except (OSError, AttributeError):
        return False
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    address = find(library._handle, b"__cpu_model", b"GCC_4.8.0")
    if address is None:
        return False
    maker, _, _, features = (ctypes.c_uint * 4).from_address(address)
    return maker == _AMD and features & _AVX2 != 0 and features & _FMA != 0
