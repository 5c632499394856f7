"""Plugin classes over torch: what they answer without torch, without a backend and with an unknown substitute."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import hal_torch_device
import pytest
from hal_core import Unavailable
from hal_torch_device import TorchCpu, TorchCuda, TorchPlugin


class NpuPlugin(TorchPlugin):
    name = "npu"
    kind = "npu"
    backend = "torch_of_nobody"
    cure = "install torch_of_nobody"


def installed(monkeypatch, version):
    def find(_):
        if version is None:
            raise PackageNotFoundError
        return version

    monkeypatch.setattr(hal_torch_device, "version", find)


def test_the_probe_imports_neither_numpy_nor_torch():
    code = "import sys, hal_torch_device as p; p.TorchCpu.probe(); p.TorchCuda.probe()"
    heavy = "print({'numpy', 'paddle', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("plugin", "version", "place", "reason"),
    [
        (TorchCpu, None, "", "torch is not installed"),
        (NpuPlugin, None, "cpu", "torch is not installed"),
        (NpuPlugin, "2.13.0", "", "torch_of_nobody is not installed"),
        (TorchCuda, "2.13.0+cpu", "", r"torch 2\.13\.0\+cpu is built without cuda"),
        (NpuPlugin, "2.13.0", "gpu", "HAL_NPU_PLACE=gpu is not a known substitute"),
    ],
)
def test_what_is_missing_is_named_with_the_cure(monkeypatch, plugin, version, place, reason):
    installed(monkeypatch, version)
    monkeypatch.setenv(plugin.variable(), place)
    with pytest.raises(Unavailable, match=reason) as refused:
        plugin.open(0, {})
    assert refused.value.cure
    assert plugin.probe().reason == refused.value.what


def test_what_was_not_tried_yet_is_said(monkeypatch):
    installed(monkeypatch, "2.13.0+cu130")
    assert "tried when the device is opened" in TorchCuda.probe().reason
    monkeypatch.setenv("HAL_TORCH_CUDA_PLACE", "queue")
    assert TorchCuda.probe().reason == "substituted: queue, no chip is used"
    assert (TorchCuda.shown(), TorchCuda.count()) == ("torch_cuda (substituted: queue)", 0)
