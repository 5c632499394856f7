"""Paddle's launcher gives a device to none of hal's ranks, whatever it would see; hal shares them out. It goes by what
hal tells it."""

from __future__ import annotations

import sys

import pytest

from hal.distributed.launcher import by_its_arguments, without_devices


@pytest.fixture
def context(monkeypatch):
    """What Paddle's launcher knows of its host, in this process, which it looks at as if it were new."""
    device = pytest.importorskip("paddle.distributed.launch.context.device")
    for name in ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "XPULINK_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "get_all_custom_device_type", list)
    monkeypatch.setattr(device.Device, "parse_device", device.Device.parse_device)  # put back afterwards
    return device


def named(context, monkeypatch):
    """Paddle of any kind, and a variable that names a card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def built_for_cuda(context, monkeypatch):
    """Paddle that is built for CUDA, and one GPU."""
    monkeypatch.setattr(context.core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(context.core, "get_cuda_device_count", lambda: 1, raising=False)


def custom(context, monkeypatch):
    """A device that comes as a library."""
    monkeypatch.setattr(context, "get_all_custom_device_type", lambda: ["acme"])
    monkeypatch.setattr(context, "get_available_custom_device", lambda: ["acme:0"])


@pytest.mark.parametrize("host", [named, built_for_cuda, custom])
def test_the_launcher_sees_no_devices(context, monkeypatch, host):
    """One for each rank, else it ends with an IndexError: of a host with a single one it would here."""
    node = pytest.importorskip("paddle.distributed.launch.context.node")
    host(context, monkeypatch)
    assert node.Node().device.get_selected_devices() == ["0"]
    without_devices()
    assert node.Node().device.get_selected_devices() == []


def test_what_a_cluster_has_set_for_another_job_is_not_taken_for_this_one(monkeypatch):
    launcher = pytest.importorskip("paddle.distributed.launch.context")
    monkeypatch.setattr(sys, "argv", ["launch", "--nproc_per_node", "2", "--log_dir", "here", "rank.py"])
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)  # which it takes away
    set_there = {"PADDLE_NNODES": "2", "PADDLE_NPROC_PER_NODE": "8", "PADDLE_LOG_DIR": "there", "PADDLE_DEVICES": "3"}
    for name, value in set_there.items():
        monkeypatch.setenv(name, value)

    def taken():
        args = launcher.Context(enable_plugin=False).args
        return args.nnodes, args.nproc_per_node, args.log_dir, args.devices

    assert taken() == ("2", 8, "there", "3")
    by_its_arguments()
    assert taken() == ("1", 2, "here", None)
