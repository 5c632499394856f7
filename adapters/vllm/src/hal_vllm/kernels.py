"""vLLM's kernels in torch's operations, by vLLM's names.

A platform's author registers kernels of his own with vLLM's ``register_kernels``, before or after: a name that is
registered already is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from hal_core import Unavailable

from . import batch_kernels, draft_kernels, sampling_kernels
from .launching import GPU, KERNELS

__all__ = ["FUNCTIONS", "GPU", "KERNELS", "lacking", "refusing", "sampling_kernels"]

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    f"{GPU}.block_table.BlockTables.gather_block_tables": batch_kernels.gather_block_tables,
    f"{GPU}.block_table.BlockTables.compute_slot_mappings": batch_kernels.compute_slot_mappings,
    f"{GPU}.spec_decode.rejection_sampler.rejection_sample": draft_kernels.rejection_sample,
}
"""What is replaced with the kernels in it: two methods whose kernels read tensors by their addresses, and a function
with five kernels."""


def kernel_in(name: str) -> str:
    """Return the name of the kernel in a method of :data:`FUNCTIONS`; who registers that one keeps vLLM's method."""
    return name.replace("BlockTables.", "_") + "_kernel"


def refusing(name: str) -> Function:
    """Return a stand-in for a kernel that hal does not have: it refuses to run, by name."""

    def refused(*_: object, **__: object) -> None:
        what = "there is no Triton, and hal has no kernel in its place"
        cure = "leave out the request's parameter that needs it, or register one with vLLM's register_kernels"
        raise Unavailable(what, cure=cure, hook=name)

    refused.__name__ = name.rsplit(".", 1)[1]
    return refused


def lacking(modules: dict[str, Any]) -> list[str]:
    """Return the kernels of vLLM's runner in the loaded ``modules`` that nothing was given for, by name.

    Without Triton a kernel is the plain function that its decorator was given; a registered one is no function.
    """
    found, known = [], {*KERNELS, *map(kernel_in, FUNCTIONS)}
    for name, module in modules.items():
        if name.startswith(GPU + "."):
            for key, value in vars(module).items():
                own = isinstance(value, FunctionType) and value.__module__ == name
                if own and key.endswith("_kernel") and f"{name}.{key}" not in known:
                    found.append(f"{name}.{key}")
    return sorted(found)
