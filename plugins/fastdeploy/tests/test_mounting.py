"""The entry point of FastDeploy's model runners, over modules that stand in for FastDeploy's."""

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
class GPUModelRunner:
    def __init__(self, fd_config, device, device_id, rank, local_rank):
        self.device_id, self.passed = device_id, []

    def insert_tasks_v1(self, req_dicts, num_running_requests):
        self.passed.append((req_dicts, num_running_requests))
"""


@pytest.fixture
def fastdeploy(monkeypatch):
    """FastDeploy's modules as the entry point asks for them; ``platform`` says which chip."""
    made = {name: ModuleType(name) for name in ("fastdeploy", "fastdeploy.platforms", "fastdeploy.worker")}
    runner = made["fastdeploy.worker.gpu_model_runner"] = ModuleType("fastdeploy.worker.gpu_model_runner")
    runner.__file__ = "<gpu_model_runner>"
    linecache.cache[runner.__file__] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), runner.__file__)
    exec(compile(SOURCE, runner.__file__, "exec"), vars(runner))
    made["fastdeploy.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: True)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(mounting.UNTESTED, raising=False)
    return made


def test_the_entry_point_is_called_hal():
    (point,) = metadata.entry_points(group="fastdeploy.model_runner_plugins")
    assert (point.name, point.dist.name) == ("hal", "paddle-hal-fastdeploy")
    assert point.load() is mounting.model_runner


def test_a_fastdeploy_that_nobody_compared_is_refused(fastdeploy, caplog):
    with pytest.raises(Unavailable, match=r"nobody has compared this FastDeploy's insert_tasks_v1 .*_UNTESTED=1"):
        mounting.model_runner()
    assert "FastDeploy goes on with its own model runner" in caplog.text


def test_another_platform_is_refused(fastdeploy):
    fastdeploy["fastdeploy.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: False)
    with pytest.raises(Unavailable, match="another platform"):
        mounting.model_runner()


@pytest.mark.parametrize("known", [False, True])
def test_its_runner_inserts_through_hal(fastdeploy, monkeypatch, tmp_path, known, caplog):
    base = fastdeploy["fastdeploy.worker.gpu_model_runner"].GPUModelRunner
    if known:
        (tmp_path / "compared.json").write_text(json.dumps({"2.6": mounting.digest_of(base)}))
        monkeypatch.setattr(mounting, "files", lambda package: tmp_path)
    else:
        monkeypatch.setenv(mounting.UNTESTED, "1")
    runner_class = mounting.model_runner()
    assert issubclass(runner_class, base)
    assert ("nobody has compared" in caplog.text) is not known
    opened = []
    with hal.open_device("cpu") as device:
        monkeypatch.setattr(hal, "open_device", lambda name, index: opened.append((name, index)) or device)
        runner = runner_class(fd_config=None, device="gpu", device_id=3, rank=0, local_rank=0)
        for name, value in vars(up.runner_of(up.arrays(up.TARGET))).items():
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
        np.testing.assert_array_equal(runner.share_inputs["token_ids_all"][1, :3], [4, 5, -1])
    assert opened == [("cuda", 3)]
    assert [given[1] for given in runner.passed] == [2], "EXTEND is upstream's"
