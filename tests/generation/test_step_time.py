"""The device's time of an engine's steps: measured where the device can and somebody asks, else absent."""

from __future__ import annotations

import time
from itertools import count

import pytest
from hal_core import Request, SamplingParams

from hal.generation.opening import opened
from hal.generation.plan import ModelPlan

TOKENS = 6


@pytest.fixture
def sim():
    pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    from hal_sim import NoCompiler
    from hal_sim.build import core_library

    try:
        core_library()
    except NoCompiler as error:
        pytest.skip(str(error))


def generated(device, *, timed, **options):
    """Generate some tokens; return the device's seconds after the opening and at the end, and the elapsed ones."""
    plan = ModelPlan(None)
    began = time.monotonic()
    serve = plan.serve(device=device, timed=timed, max_model_len=64, **options)
    with opened(serve, lambda record: None) as (engine, _):
        first = engine.worker.device_seconds
        engine.submit(Request("a", plan.encode("def main("), SamplingParams(max_tokens=TOKENS, temperature=0)))
        ended = []
        while engine.busy:
            ended += engine.step()
        assert [len(one.token_ids) for one in ended] == [TOKENS]
        return first, engine.worker.device_seconds, time.monotonic() - began


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_device_with_timed_events_measures_its_steps(sim, overlap):
    first, seconds, elapsed = generated("sim", timed=True, runner="hal_sim.mixing:MixRunner", overlap=overlap)
    assert first == 0.0 < seconds < elapsed


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_time_of_each_step_counts_once(sim, monkeypatch, overlap):
    """On a device whose clock advances by one second for each event."""
    from hal_sim.device import SimDevice

    class Tick:
        def __init__(self, at):
            self.at = at

        def seconds_since(self, earlier):
            return float(self.at - earlier.at)

    ticks = count()
    monkeypatch.setattr(SimDevice, "timed_event", lambda self, stream: Tick(next(ticks)))
    _, seconds, _ = generated("sim", timed=True, runner="hal_sim.mixing:MixRunner", overlap=overlap)
    assert seconds == TOKENS, "a step a token is taken"


def test_nobody_asks_and_no_event_is_timed(sim, monkeypatch):
    from hal_sim.device import SimDevice

    monkeypatch.setattr(SimDevice, "timed_event", None)
    assert generated("sim", timed=False, runner="hal_sim.mixing:MixRunner")[:2] == (None, None)


def test_a_device_without_timed_events_measures_nothing():
    assert generated("cpu", timed=True)[:2] == (None, None)
