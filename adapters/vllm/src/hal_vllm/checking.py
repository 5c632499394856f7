"""Compare the installed vLLM with hal: what it looks like, and drawn sequences on both.

Triton must not be loaded before ``interpreted`` is called: it reads the environment once.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hal_core import Unavailable


@dataclass
class Report:
    """``changed``: what of vLLM looks otherwise than hal knows. ``differing``: kernel or class to its first difference.
    ``counts``: comparisons of each that were equal."""

    changed: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def interpreted() -> None:
    """Let Triton interpret vLLM's kernels in this process, which has no driver of Triton's.

    :raises Unavailable: if vLLM or Triton is missing, or loaded already.
    """
    if "triton" in sys.modules or "vllm" in sys.modules:
        raise Unavailable("Triton or vLLM is loaded already", cure="check in a process of its own")
    defaults = {"TRITON_INTERPRET": "1", "HAL_VLLM": "off", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    os.environ.update(defaults)
    try:
        import_module("vllm")
        backends = import_module("triton.backends")
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed", cure="install vLLM beside hal (docs/vllm.md)") from error

    _take_wide_masks()

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends.clear()  # beside the driver of a GPU, vLLM would find two, and take that for none
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)
    importing = import_module("vllm.triton_utils")
    if not importing.HAS_TRITON:
        raise Unavailable("vLLM finds no Triton", cure="install Triton, as vLLM for a GPU does")


def _take_wide_masks() -> None:
    """Let the interpreter load and store by masks that its own ``&`` of scalars made integers: it refuses them."""
    builder = import_module("triton.runtime.interpreter").InterpreterBuilder

    def taking(name: str, place: int) -> None:
        original = getattr(builder, name)

        def masked(self: Any, *given: Any) -> Any:  # noqa: ANN401 (Triton's)
            given[place].data = given[place].data.astype(bool)
            return original(self, *given)

        setattr(builder, name, masked)

    taking("create_masked_load", 1)
    taking("create_masked_store", 2)


def check(
    device: str,
    *,
    count: int = 30,
    first: int = 0,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> Report:
    """Compare the installed vLLM with ``device`` and hal's kernels, over ``count`` drawn sequences.

    :param device: a hal device, or "" for that of vLLM's platform.
    :param kernels: an author's own, by vLLM's qualified names, in the place of hal's.
    """
    import torch

    platform = import_module("vllm.platforms").current_platform
    if platform.device_type == "cpu":
        import_module("vllm.v1.worker.cpu.shm")
    else:
        host = import_module("vllm.v1.worker.cpu.buffer_utils").UvaBuffer
        vars(import_module("vllm.v1.worker.gpu.buffer_utils"))["UvaBuffer"] = host
    from .installing import open_stage
    from .sequences import Sequence
    from .sides import Differs, Sides

    report = Report()
    stage = open_stage(device, torch.device(platform.device_type))
    sides = Sides(replacements(stage, kernels or {}, report))
    for seed in range(first, first + count):
        try:
            Sequence(seed, sides, stage, report.counts).run()
        except Differs as found:
            report.differing.setdefault(found.what, str(found))
        finally:
            sides.play(False)
    return report


def replacements(stage: Any, kernels: Mapping[str, Callable[..., Any]], report: Report) -> dict[int, Any]:  # noqa: ANN401
    """Return the id of each of vLLM's objects to the one in its place, and report what looks otherwise."""
    from .buffers import classes_over
    from .installing import BUFFERS
    from .kernels import FUNCTIONS, GPU, KERNELS, kernel_in
    from .launching import REGISTRY
    from .signatures import compare_classes, compare_functions

    import_module(f"{GPU}.model_runner")
    known, over = KERNELS | FUNCTIONS, classes_over(stage)
    functions, lines = compare_functions(known, kernels)
    classes, changed = compare_classes(import_module(BUFFERS))
    report.changed += changed + lines
    found: dict[int, Any] = {id(theirs): over[name] for name, theirs in classes.items()}
    for name, theirs in functions.items():
        ours = kernels.get(name) or known[name]
        if name not in FUNCTIONS:
            found[id(theirs)] = import_module(REGISTRY).KernelOverride(theirs, ours)
        elif kernel_in(name) not in kernels:
            found[id(theirs)] = ours
    return found
