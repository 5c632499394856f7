"""The device under Paddle, in another process, as Paddle takes devices only while it is imported."""

from __future__ import annotations

from typing import Any

import pytest
from hal_core.errors import Unavailable
from hal_sim import NoPaddle, paddle_env
from hal_sim.build import installed_paddle

SCRIPT = "paddle_probe.py"
try:
    installed_paddle()
except NoPaddle as missing:
    pytestmark = pytest.mark.skip(reason=str(missing))

# The one that changes a flag of Paddle comes last.
PROBES = ("tensors", "held_stream", "host_source", "kernels", "streams", "out_of_memory", "device_fault", "fallback")


@pytest.fixture(scope="module")
def answers(probe) -> dict[str, Any]:
    """One process for all of them: an import of Paddle takes longer than any. Lazy mode, so that no test passes by
    luck.
    """
    return probe(SCRIPT, ",".join(PROBES), environment=paddle_env.environment(mode=2))


def launch(kind: str) -> dict[str, int]:
    return {kind: 1, "submissions": 1, "launches": 1}


@pytest.mark.parametrize(("name", "count"), [("hal_sim", 2), pytest.param("metax_gpu", 3, marks=pytest.mark.conform)])
def test_tensors_views_and_copies(answers, probe, name, count):
    got = answers["tensors"]
    if name != "hal_sim":
        got = probe(SCRIPT, "tensors", environment=paddle_env.environment(name, devices=count))["tensors"]
    assert got["types"] == [name]
    assert got["count"] in (count, None)
    assert got["place"] == f"Place({name}:0)"
    assert got["device memory"] == 1
    assert got["round trip"]
    assert got["bytes"]
    assert got["view shares"] == 4 * 5
    assert got["view"] == got["contiguous"] == [[5.0, 6.0], [9.0, 10.0]]
    assert got["races"] == []


def test_paddles_stream_is_ours_and_can_be_held(answers):
    assert answers["held_stream"] == {
        "before": [0.0] * 4,
        "pending": 1,
        "after": [1.0] * 4,
        "address kept": True,
    }


def test_paddle_does_not_keep_a_pageable_source_alive(answers):
    assert answers["host_source"] == {"seen": [9.0] * 4, "races": 1}


def test_our_kernels_run_on_the_stream_without_fallback(answers):
    got = answers["kernels"]
    version = tuple(int(part) for part in got["version"].split(".")[:2])
    for operator, kind in [
        ("full", "kernel_fill"),
        ("assign", "kernel_strided"),
        ("contiguous", "kernel_strided"),
        ("fill_", "kernel_fill"),
        ("fill of a slice", "kernel_fill"),
        ("scatter_", "kernel_index"),
    ]:
        assert got[operator] == launch(kind), operator
    assert got["filled"] == [5.0, 7.0, 5.0]
    if version >= (3, 2):  # before, copy_ into a view writes over its neighbours, on every place
        assert got["copy into a view"] == launch("kernel_strided")
        assert got["copied"] == [5.0, 1.0, 1.0, 5.0]
    assert got["scatter"] == got["scattered"] == [2.0, 4.0, 1.0]
    assert got["scatter adds"] == [0.0, 3.0, 8.0]
    assert got["full of each type"] == [[1.0, 1.0]] + [[3.0, 3.0]] * 9
    assert got["halves"] == [[pytest.approx(0.1, rel=1e-3)] * 3, [pytest.approx(0.1, rel=1e-2)] * 3]
    assert got["races"] == []


def test_two_paddle_streams(answers):
    got = answers["streams"]
    assert got["False"] == {"seen": [0.0] * 4, "races": ["kernel_fill"]}
    assert got["True"] == {"seen": [5.0] * 4, "races": []}


def test_a_fallback_shows_and_can_be_refused(answers):
    got = answers["fallback"]
    assert got["refused"]
    assert got["moved"]["fallback"] == got["moved"]["copy_d2h"] == got["moved"]["copy_h2d"] == 1
    assert "fallback" not in got["plain copy"]
    assert "launches" not in got["moved"]


def test_out_of_memory_is_paddles_own_error_and_the_device_works_on(answers):
    assert answers["out_of_memory"] == {"named": True, "works on": [0.0] * 4}


def test_a_device_fault_reaches_paddle(answers):
    assert answers["device_fault"] == {"named": True, "then": [0.0] * 4}


def test_announcing_too_late_is_an_error_with_the_cure(monkeypatch):
    import sys
    import types

    late = types.SimpleNamespace(device=types.SimpleNamespace(get_all_custom_device_type=lambda: ["other"]))
    monkeypatch.setitem(sys.modules, "paddle", late)
    with pytest.raises(Unavailable, match="before the first import of paddle"):
        paddle_env.announce()
