"""Functions in the place of vLLM's kernels, with vLLM's names and parameters."""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Callable
from types import SimpleNamespace

GPU = "vllm.v1.worker.gpu"
REGISTRY = "vllm.triton_utils.dispatcher"
"""vLLM's module of registered kernels."""
KERNELS: dict[str, Kernel] = {}
"""Qualified name of each kernel of vLLM's to the function in its place."""


class Kernel:
    """A function that is launched with a kernel's arguments, and gets them by name, without the suffix ``_ptr``.

    Options of a launch on a GPU are left out. ``__signature__``: the kernel's parameters, compared with vLLM's.
    """

    def __init__(self, function: Callable[[SimpleNamespace], None], parameters: str) -> None:
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        named = [one.partition("=") for one in parameters.split()]
        self.names = [name.removesuffix("_ptr") for name, _, _ in named]
        self.defaults = {name: literal_eval(value) for name, given, value in named if given}
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind, default=self.defaults.get(name, empty)) for name, _, _ in named]
        )

    def __call__(self, *args: object, num_warps: int = 0, num_stages: int = 0, **named: object) -> None:
        """Launch it."""
        by_name = {name.removesuffix("_ptr"): value for name, value in (self.defaults | named).items()}
        self.function(SimpleNamespace(**(by_name | dict(zip(self.names, args, strict=False)))))


def kernel(module: str, parameters: str) -> Callable[[Callable[[SimpleNamespace], None]], Kernel]:
    """Let a function stand for the kernel of its name in a module of vLLM's ``v1/worker/gpu``.

    ``parameters``: the kernel's, in their order, with their defaults.
    """

    def registered(function: Callable[[SimpleNamespace], None]) -> Kernel:
        made = KERNELS[f"{GPU}.{module}.{function.__name__}"] = Kernel(function, parameters)
        return made

    return registered
