"""Fixtures that open the cuda device over a stand-in for the CUDA driver (driver.c)."""

import ctypes
import importlib.util
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
from hal_core import StateConfig
from hal_core.runtime.bound import bind
from hal_cuda import launching, nccl
from hal_cuda import memory as gpu_memory
from hal_cuda.driver import Driver
from hal_cuda.native_device import open_gpu


def stand_in():
    """Return the module that builds the stand-in library."""
    spec = importlib.util.spec_from_file_location("hal_cuda_stand_in", Path(__file__).with_name("stand_in.py"))
    module = sys.modules.get(spec.name)
    if module is None:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def default_device(options, driver):
    return open_gpu(0, options, driver)


@contextmanager
def opener(*, native):
    """Yield a function that opens bound devices, with or without the native part; close them at the end."""
    found = []

    def open_with(options=None, make=default_device):
        built = stand_in().built()
        if isinstance(built, str):
            pytest.skip(f"the native part cannot be built: {built}")
        module, library = built
        api = stand_in().Library(library)
        driver = Driver(api, module if native else None, api.library)
        found.append(bind(make({"stream": 1, **(options or {})}, driver)))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "cubin", lambda name, arch: b"")
        patch.setattr(gpu_memory, "_gpus", defaultdict(gpu_memory.GpuMemory))  # separate from other tests' devices
        yield open_with
        for bound in found:
            bound.close()


@pytest.fixture
def opened():
    """Open a device on the native path: ``opened(options)``; its driver is ``bound.device.driver.api``."""
    with opener(native=True) as open_with:
        yield open_with


@pytest.fixture
def fallback():
    """Open a device without the native part, in the same way."""
    with opener(native=False) as open_with:
        yield open_with


@pytest.fixture
def library(monkeypatch):
    """Return the stand-in for NCCL, also used by the product."""
    found = stand_in().built()
    if isinstance(found, str):
        pytest.skip(f"the native part cannot be built: {found}")
    monkeypatch.setenv(nccl.VARIABLE, str(found[1].with_name(stand_in().NCCL)))
    nccl.library.cache_clear()
    yield stand_in().nccl(ctypes.CDLL(str(found[1])))
    nccl.library.cache_clear()


@pytest.fixture
def two(opened, library):
    """Open both ranks of a group over it: ``two(timeout)``; see ``pair`` of stand_in.py."""
    made = []

    def make(timeout=20.0):
        made.extend(stand_in().pair([opened(), opened()], StateConfig(4, 16, max_draft_tokens=2), timeout))
        return made[-2:]

    yield make
    for rank in made:
        rank.open.close()
