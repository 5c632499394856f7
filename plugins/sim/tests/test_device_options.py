"""Opening the sim device: its options, and its errors where it is unavailable."""

import pytest
from hal_core.errors import InvalidValue, OutOfMemory
from hal_core.runtime.bound import bind
from hal_sim import Mode, SimPlugin, options, set_option


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": 1}, r"sim: options: unknown options \['colour'\] \(known: ring_start, .*mode, devices"),
        ({"mode": "fast"}, "mode = 'fast' .give one of eager, worker, lazy"),
        ({"delay_us": -1}, "delay_us = -1"),
        ({"ring_limit": 1}, "ring_limit = 1"),
        ({"ring_start": 1 << 30}, "ring_start is larger than ring_limit"),
    ],
)
def test_options_are_checked_before_any_is_set(given, message):
    with options(delay_us=0), pytest.raises(InvalidValue, match=message):
        SimPlugin.open(0, {"delay_us": 5, **given})
    assert set_option("delay_us", 0) == 0


def test_options_reach_the_accelerator():
    with (
        options(mode=Mode.WORKER, devices=2, memory_mb=1024),
        bind(SimPlugin.open(2, {"mode": "eager", "devices": 3, "memory_mb": 1})) as device,
    ):
        assert device.name == "sim:2"
        with pytest.raises(OutOfMemory, match="sim:2: device 2 has "):
            device.device.allocate(2 << 20)
    with pytest.raises(InvalidValue, match="device 7 does not exist"):
        SimPlugin.open(7, {})


def test_without_a_compiler_the_probe_gives_reason_and_cure(monkeypatch, tmp_path):
    assert SimPlugin.probe().available
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert SimPlugin.probe().available, "what was built before is enough"
    monkeypatch.setenv("HALSIM_CACHE", str(tmp_path))
    found = SimPlugin.probe()
    assert (found.available, found.reason[:21]) == (False, "no C++ compiler found")
    assert "install g++" in found.cure
