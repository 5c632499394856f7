"""Paddle's launcher assigns no device to hal's ranks, whatever it would see; hal assigns them. It uses hal's settings
alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hal_engine.distributed.launcher import by_its_arguments, without_devices, without_environment_in_files


@pytest.fixture
def context(monkeypatch):
    """The host's properties as Paddle's launcher reads them in this process, read again for each test."""
    device = pytest.importorskip("paddle.distributed.launch.context.device")
    for name in ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "XPULINK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "get_all_custom_device_type", list)
    monkeypatch.setattr(device.Device, "parse_device", device.Device.parse_device)  # put back afterwards
    return device


def named(context, monkeypatch):
    """Any build of Paddle, and a variable that names a card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def built_for_cuda(context, monkeypatch):
    """Paddle that is built for CUDA, and one GPU."""
    monkeypatch.setattr(context.core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(context.core, "get_cuda_device_count", lambda: 1, raising=False)


def custom(context, monkeypatch):
    """A device that comes as a plugin library."""
    monkeypatch.setattr(context, "get_all_custom_device_type", lambda: ["acme"])
    monkeypatch.setattr(context, "get_available_custom_device", lambda: ["acme:0"])


@pytest.mark.parametrize("host", [named, built_for_cuda, custom])
def test_the_launcher_sees_no_devices(context, monkeypatch, host):
    """The launcher wants a card for each rank, else it ends with an IndexError: with one card it would here."""
    node = pytest.importorskip("paddle.distributed.launch.context.node")
    host(context, monkeypatch)
    assert node.Node().device.get_selected_devices() == ["0"]
    without_devices()
    assert node.Node().device.get_selected_devices() == []


def test_what_a_cluster_has_set_for_another_job_is_not_taken_for_this_one(monkeypatch):
    launcher = pytest.importorskip("paddle.distributed.launch.context")
    monkeypatch.setattr(sys, "argv", ["launch", "--nproc_per_node", "2", "--log_dir", "here", "rank.py"])
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)  # which the launcher removes
    set_there = {"PADDLE_NNODES": "2", "PADDLE_NPROC_PER_NODE": "8", "PADDLE_LOG_DIR": "there", "PADDLE_DEVICES": "3"}
    for name, value in set_there.items():
        monkeypatch.setenv(name, value)

    def taken():
        args = launcher.Context(enable_plugin=False).args
        return args.nnodes, args.nproc_per_node, args.log_dir, args.devices

    assert taken() == ("2", 8, "there", "3")
    by_its_arguments()
    assert taken() == ("1", 2, "here", None)


def test_a_ranks_variables_are_kept_only_where_they_are_too_long(tmp_path, monkeypatch):
    """The settings that Paddle passes to its ranks in a file, because they do not fit into an environment."""
    contexts = pytest.importorskip("paddle.distributed.launch.utils.process_context")
    controllers = pytest.importorskip("paddle.distributed.launch.controllers.controller")
    for place, name in ((contexts, "json"), (controllers.Controller, "save_pod_env")):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back afterwards
    monkeypatch.setattr(controllers.Controller, "save_pod_log", controllers.Controller.save_pod_log)
    without_environment_in_files()
    variables = {"TOKEN": "hidden", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2"}
    place = {"PADDLE_LOG_DIR": str(tmp_path), "PADDLE_TRAINER_ID": "0"}
    with open(tmp_path / "log", "wb") as log:
        started = contexts.ProcessContext(["true"], env=variables | place, out=log, err=log)
        started.start()
        started.wait()
    assert json.loads((tmp_path / "backup_env.0.json").read_text()) == {"PADDLE_TRAINER_ENDPOINTS": "a:1,b:2"}


@pytest.mark.conform
def test_nothing_of_the_environment_is_written_to_files(tmp_path):
    """Paddle's own launcher writes all of them beside the log, and prints them on a failure if a flag asks for it."""
    pytest.importorskip("paddle.distributed.launch")
    rank = [sys.executable, "-c", "import sys; print('here'); sys.exit(3)"]
    options = ["--nproc_per_node", "1", "--log_dir", str(tmp_path), "--job_id", "hal", "--max_restart", "0"]
    launcher = [sys.executable, "-P", "-c", "from hal_engine.distributed.launcher import main; main()", *options, *rank]
    told = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLAGS_print_launcher_env": "1"}
    done = subprocess.run(
        launcher, env=os.environ | told | {"TOKEN": "hidden"}, capture_output=True, text=True, check=False
    )
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files["workerlog.0"].endswith("here\n")
    assert [name for name, text in files.items() if "hidden" in text] == []
    assert "status failed" in done.stdout + done.stderr
    assert "hidden" not in done.stdout + done.stderr
