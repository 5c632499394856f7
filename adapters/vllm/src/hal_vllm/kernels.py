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

__all__ = ["GPU", "KERNELS", "METHODS", "REJECTION", "REJECTION_SAMPLE", "lacking", "refusing", "sampling_kernels"]

Function = Callable[..., Any]
METHODS: dict[str, Function] = {
    "gather_block_tables": batch_kernels.gather_block_tables,
    "compute_slot_mappings": batch_kernels.compute_slot_mappings,
}
"""Methods of vLLM's ``BlockTables`` in the place of kernels that read tensors by their addresses."""
REJECTION = f"{GPU}.spec_decode.rejection_sampler.rejection_sample"
"""The name of the one function that is replaced, with five kernels in it."""
REJECTION_SAMPLE: Function = draft_kernels.rejection_sample
IN_METHODS = {f"{GPU}.block_table._{name}_kernel" for name in METHODS}


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
    found = []
    for name, module in modules.items():
        if name.startswith(GPU + "."):
            for key, value in vars(module).items():
                own = isinstance(value, FunctionType) and value.__module__ == name
                if own and key.endswith("_kernel") and f"{name}.{key}" not in IN_METHODS | set(KERNELS):
                    found.append(f"{name}.{key}")
    return sorted(found)
