"""The entry point of FastDeploy's model runners, over stand-in modules for FastDeploy's."""

from __future__ import annotations

import importlib.util
import json
import linecache
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hal_core import Unavailable
from hal_fastdeploy import mounting

import hal

_spec = importlib.util.spec_from_file_location("upstream_of_mounting", Path(__file__).with_name("upstream.py"))
up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(up)
SOURCE = """
class {name}:
    def __init__(self, fd_config, device, device_id, rank, local_rank):
        self.device_id, self.passed = device_id, []

    def insert_tasks_v1(self, req_dicts, num_running_requests):
        self.passed.append((req_dicts, num_running_requests))
"""


@pytest.fixture
def fastdeploy(monkeypatch):
    """FastDeploy's modules that the entry point imports; the platform is a GPU's."""
    made = {name: ModuleType(name) for name in ("fastdeploy", "fastdeploy.platforms", "fastdeploy.worker")}
    for chip, name in (("gpu", "GPUModelRunner"), ("xpu", "XPUModelRunner")):
        runner = made[f"fastdeploy.worker.{chip}_model_runner"] = ModuleType(f"fastdeploy.worker.{chip}_model_runner")
        runner.__file__, source = f"<{chip}_model_runner>", SOURCE.format(name=name)
        linecache.cache[runner.__file__] = (len(source), None, source.splitlines(keepends=True), runner.__file__)
        exec(compile(source, runner.__file__, "exec"), vars(runner))
    made["fastdeploy.platforms"].current_platform = platform("gpu")
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(mounting.UNTESTED, raising=False)
    return made


def platform(chip):
    return SimpleNamespace(is_cuda=lambda: chip == "gpu", is_xpu=lambda: chip == "xpu")


def test_the_entry_point_is_called_hal():
    (point,) = metadata.entry_points(group="fastdeploy.model_runner_plugins")
    assert (point.name, point.dist.name) == ("hal", "paddle-hal-fastdeploy")
    assert point.load() is mounting.model_runner


def test_an_uncompared_fastdeploy_is_refused(fastdeploy, caplog):
    with pytest.raises(Unavailable, match=r"insert_tasks_v1 was not compared with hal's .*_UNTESTED=1"):
        mounting.model_runner()
    assert "FastDeploy keeps its own model runner" in caplog.text


def test_another_platform_is_refused(fastdeploy):
    fastdeploy["fastdeploy.platforms"].current_platform = platform("npu")
    with pytest.raises(Unavailable, match="another platform"):
        mounting.model_runner()


RUNNERS = {"gpu": ("GPUModelRunner", "cuda"), "xpu": ("XPUModelRunner", "xpu")}


@pytest.mark.parametrize("chip", RUNNERS)
@pytest.mark.parametrize("known", [False, True])
def test_its_runner_inserts_through_hal(fastdeploy, monkeypatch, tmp_path, chip, known, caplog):
    name, plugin = RUNNERS[chip]
    fastdeploy["fastdeploy.platforms"].current_platform = platform(chip)
    base = getattr(fastdeploy[f"fastdeploy.worker.{chip}_model_runner"], name)
    if known:
        (tmp_path / "compared.json").write_text(json.dumps({"2.6": mounting.digest_of(base)}))
        monkeypatch.setattr(mounting, "files", lambda package: tmp_path)
    else:
        monkeypatch.setenv(mounting.UNTESTED, "1")
    runner_class = mounting.model_runner()
    assert issubclass(runner_class, base)
    assert ("was not compared" in caplog.text) is not known
    opened = []
    with hal.open_device("cpu") as device:
        monkeypatch.setattr(hal, "open_device", lambda name, index: opened.append((name, index)) or device)
        runner = runner_class(fd_config=None, device=chip, device_id=3, rank=0, local_rank=0)
        for name, value in vars(up.runner_of(up.target_arrays(kind=chip), kind=chip)).items():
            setattr(runner, name, value)
        request = up.Request(
            up.PREFILL,
            1,
            "r",
            prompt_token_ids=[4, 5],
            output_token_ids=[],
            prefill_start_index=0,
            prefill_end_index=2,
            block_tables=[7],
            eos_token_ids=[1, 2],
        )
        runner.insert_tasks_v1(req_dicts=[request], num_running_requests=2)
        runner.insert_tasks_v1([up.Request(up.EXTEND, 1, "r")], 2)
        np.testing.assert_array_equal(runner.share_inputs["input_ids"][1, :3], [4, 5, 0])
        first = runner.share_inputs["first_token_ids" if chip == "xpu" else "token_ids_all"]
        assert first[1, 0] == 4, "what this chip's runner alone has"
    assert opened == [(plugin, 3)]
    assert [given[1] for given in runner.passed] == [2], "EXTEND is upstream's"
