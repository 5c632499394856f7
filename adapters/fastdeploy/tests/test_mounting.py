"""The entry point of FastDeploy's model runners, over stand-in modules for FastDeploy's."""

import json
import linecache
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hal_core import DeviceNotFound, InvalidValue, Unavailable
from hal_fastdeploy import mounting

import hal
from hal import selection

from . import functions
from . import upstream as up

MADE = """class {name}:
    def __init__(self, fd_config, device, device_id, rank, local_rank):
        self.device, self.device_id = device, device_id

"""
UPSTREAM = "raise LookupError('upstream', num_running_requests)"
MODULES = {
    # module: class, and whose names its function has
    "fastdeploy.worker.gpu_model_runner": ("GPUModelRunner", "gpu"),
    "fastdeploy.worker.xpu_model_runner": ("XPUModelRunner", "xpu"),
    "fastdeploy.spec_decode.mtp": ("MTPProposer", "proposer"),
}


def fill(module, name, kind, more=()):
    """Put a class into a module, whose function does what hal knows and ``more``; called, it raises."""
    functions_source = functions.source_of(kind, more).replace(
        "        idx = 0\n", f"        idx = 0\n        {UPSTREAM}\n"
    )
    module.__file__, source = f"<{module.__name__} {next(functions.NUMBER)}>", MADE.format(name=name) + functions_source
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec"), vars(module))


@pytest.fixture
def fastdeploy(monkeypatch):
    """FastDeploy's modules that the entry point imports; the platform is a GPU's."""
    packages = ("fastdeploy", "fastdeploy.platforms", "fastdeploy.worker", "fastdeploy.spec_decode")
    made = {name: ModuleType(name) for name in (*packages, *MODULES)}
    for name, (class_name, kind) in MODULES.items():
        fill(made[name], class_name, kind)
    made["fastdeploy.platforms"].current_platform = platform("gpu")
    for name, one in made.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.delenv(mounting.UNTESTED, raising=False)
    monkeypatch.setattr(selection, "select", lambda name: None)  # of this machine's drivers: below
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


@pytest.mark.parametrize("chip", ["gpu", "xpu"])
def test_without_a_driver_fastdeploy_keeps_its_runner(fastdeploy, monkeypatch, chip, caplog):
    """At mounting, because FastDeploy has no other runner afterwards."""
    fastdeploy["fastdeploy.platforms"].current_platform = platform(chip)
    monkeypatch.setenv(mounting.UNTESTED, "1")

    def no_driver(name):
        raise Unavailable("no driver", cure="install it", device=name)

    monkeypatch.setattr(selection, "select", no_driver)
    with pytest.raises(Unavailable, match="no driver"):
        mounting.model_runner()
    assert "FastDeploy keeps its own model runner" in caplog.text


def test_without_the_devices_plugin_fastdeploy_keeps_its_runner(fastdeploy, monkeypatch):
    """Asked as it is, of a device that is nowhere."""
    monkeypatch.undo()
    monkeypatch.setenv(mounting.UNTESTED, "1")
    for name, one in fastdeploy.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setattr(mounting.GpuRunner, "device", "nowhere")
    with pytest.raises(DeviceNotFound, match="no device 'nowhere'"):
        mounting.model_runner()


@pytest.mark.parametrize("untested", ["0", "1"])
@pytest.mark.parametrize("name", MODULES)
def test_a_function_that_does_more_is_refused_by_name(fastdeploy, monkeypatch, name, untested, caplog):
    """Also where the user takes a FastDeploy that was not compared."""
    class_name, kind = MODULES[name]
    fastdeploy["fastdeploy.platforms"].current_platform = platform("xpu" if kind == "xpu" else "gpu")
    monkeypatch.setenv(mounting.UNTESTED, untested)
    fill(fastdeploy[name], class_name, kind, ['self.share_inputs["new_list"][idx] = 0', "self.listener.notify(idx)"])
    what = rf"{class_name}.insert_tasks_v1 does self.listener.notify\(\), share_inputs.new_list, which hal's insertion"
    with pytest.raises(Unavailable, match=what):
        mounting.model_runner()
    assert "share_inputs.new_list" in caplog.text


def test_a_proposer_of_another_class_is_read_too(fastdeploy, monkeypatch):
    """The class that is imported at mounting need not be the one that the runner makes."""
    monkeypatch.setenv(mounting.UNTESTED, "1")
    runner = mounting.model_runner()(fd_config=None, device="gpu:0", device_id=3, rank=0, local_rank=0)
    other = functions.function_from(functions.source_of("proposer", ["self.listener.notify(idx)"]))
    vars(runner).update(vars(up.runner_of(up.target_arrays("mtp"), up.proposer_arrays("mtp"), method="mtp")))
    proposer = type("Other", (), {"insert_tasks_v1": other})()
    vars(proposer).update(vars(runner.proposer))
    runner.proposer, runner.device = proposer, "gpu:0"
    with hal.open_device("cpu") as device:
        monkeypatch.setattr(hal, "open_device", lambda name, index: device)
        with pytest.raises(Unavailable, match=r"does self.listener.notify\(\), which hal's insertion does not"):
            runner.insert_tasks_v1([], 0)


def test_a_fastdeploy_without_its_proposer_is_refused(fastdeploy, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastdeploy.spec_decode.mtp", None)
    with pytest.raises(Unavailable, match="this FastDeploy's MTPProposer cannot be read"):
        mounting.model_runner()


def test_a_proposer_without_the_function_is_refused(fastdeploy, monkeypatch, caplog):
    del fastdeploy["fastdeploy.spec_decode.mtp"].MTPProposer.insert_tasks_v1
    with pytest.raises(Unavailable, match=r"this FastDeploy's MTPProposer cannot be read: .*insert_tasks_v1"):
        mounting.model_runner()
    assert "FastDeploy keeps its own model runner" in caplog.text


def test_g26_a_place_without_a_number_is_refused(fastdeploy, monkeypatch):
    monkeypatch.setenv(mounting.UNTESTED, "1")
    runner = mounting.model_runner()(fd_config=None, device="gpu:x", device_id=3, rank=0, local_rank=0)
    with pytest.raises(InvalidValue, match="'gpu:x' is no device name"):
        runner.insert_tasks_v1([], 0)


RUNNERS = {"gpu": ("GPUModelRunner", "cuda"), "xpu": ("XPUModelRunner", "xpu")}


@pytest.mark.parametrize("chip", RUNNERS)
@pytest.mark.parametrize("known", [False, True])
def test_its_runner_inserts_through_hal(fastdeploy, monkeypatch, tmp_path, chip, known, caplog):
    name, plugin = RUNNERS[chip]
    fastdeploy["fastdeploy.platforms"].current_platform = platform(chip)
    base = getattr(fastdeploy[f"fastdeploy.worker.{chip}_model_runner"], name)
    if known:
        proposer = fastdeploy["fastdeploy.spec_decode.mtp"].MTPProposer
        (tmp_path / "compared.json").write_text(json.dumps({"2.6": mounting.digest_of(base, proposer)}))
        monkeypatch.setattr(mounting, "files", lambda package: tmp_path)
    else:
        monkeypatch.setenv(mounting.UNTESTED, "1")
    runner_class = mounting.model_runner()
    assert issubclass(runner_class, base)
    assert ("was not compared" in caplog.text) is not known
    opened = []
    with hal.open_device("cpu") as device:
        monkeypatch.setattr(hal, "open_device", lambda name, index: opened.append((name, index)) or device)
        # the physical chip 3 is the second that the process sees
        runner = runner_class(fd_config=None, device=f"{chip}:1", device_id=3, rank=0, local_rank=0)
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
        with pytest.raises(LookupError, match="upstream"):  # EXTEND is upstream's
            runner.insert_tasks_v1([up.Request(up.EXTEND, 1, "r")], 2)
        np.testing.assert_array_equal(runner.share_inputs["input_ids"][1, :3], [4, 5, 0])
        first = runner.share_inputs["first_token_ids" if chip == "xpu" else "token_ids_all"]
        assert first[1, 0] == 4, "what this chip's runner alone has"
    assert opened == [(plugin, 1)]
