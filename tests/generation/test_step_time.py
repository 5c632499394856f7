"""The device's time of an engine's steps: measured where the device can and somebody asks, else absent."""

import time
from itertools import count

import pytest
from hal_core import Request, SamplingParams
from hal_engine.generation.plan import ModelPlan
from hal_engine.opening import open_engine
from hal_engine.options import EngineOptions

TOKENS = 6


def spent(device, *, timed, **options):
    """Generate some tokens; return the seconds of ranks and device after the opening and at the end, and the elapsed
    ones."""
    plan = ModelPlan(None)
    began = time.monotonic()
    setup = plan.serve(EngineOptions(device=device, max_model_len=64, **options), timed=timed)
    with open_engine(setup, lambda record: None) as opened:
        engine, ids = opened.engine, plan.tokenizer.encode("def main(")
        first = engine.spent
        engine.submit(Request("a", ids, SamplingParams(max_tokens=TOKENS, temperature=0)))
        ended = []
        while engine.busy:
            ended += engine.step()
        assert [len(one.token_ids) for one in ended] == [TOKENS]
        return first, engine.spent, time.monotonic() - began


def generated(device, **options):
    """The same in this process, of the device."""
    (no_ranks, first), (none, seconds), elapsed = spent(device, **options)
    assert no_ranks is none is None
    return first, seconds, elapsed


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_device_with_timed_events_measures_its_steps(simulator, overlap):
    first, seconds, elapsed = generated("sim", timed=True, runner="hal_sim.mixing:MixRunner", overlap=overlap)
    assert first == 0.0 < seconds < elapsed


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_time_of_each_step_counts_once(simulator, monkeypatch, overlap):
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


def test_nobody_asks_and_no_event_is_timed(simulator, monkeypatch):
    from hal_sim.device import SimDevice

    monkeypatch.setattr(SimDevice, "timed_event", None)
    assert generated("sim", timed=False, runner="hal_sim.mixing:MixRunner")[:2] == (None, None)


def test_a_device_without_timed_events_measures_nothing():
    assert generated("cpu", timed=True)[:2] == (None, None)


@pytest.fixture
def each_step(monkeypatch):
    """Ranks report with each step."""
    monkeypatch.setenv("HAL_SECONDS_STATS", "1e-9")


@pytest.mark.conform
def test_a_first_rank_reports_the_devices_time_and_its_own(simulator, each_step):
    runner = {"runner": "hal_sim.mixing:MixRunner", "tp": 2}
    first, (ranks, device), elapsed = spent("sim", timed=True, **runner)
    assert first == [None, None]
    assert 0 < device < elapsed
    assert 0 < ranks < elapsed


@pytest.mark.conform
@pytest.mark.parametrize(
    ("timed", "ranks"), [(True, {"split": (1, 1)}), (True, {"dp": 2}), (False, {"tp": 2})], ids=str
)
def test_ranks_report_their_own_time_alone_on_a_device_without_timed_events(each_step, timed, ranks):
    first, (host, device), elapsed = spent("cpu", timed=timed, **ranks)
    assert first == [None, None]
    assert device is None
    assert (host is not None and 0 < host < 2 * elapsed) if timed else host is None
