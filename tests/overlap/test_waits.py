"""The host waits for the output of the step before, by its event, and for no other event."""

import pytest
from hal_core import Request, SamplingParams
from hal_engine.engine import Engine

from .drawn import Schedule
from .schedules import Player, Watched, sizes_of

pytestmark = pytest.mark.usefixtures("simulator")

STEPS = 12


class Waits(Watched):
    """Records each wait for a step's output, and the launch before it; ``others`` are all further waits."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.waits, self.others, self._events = [], [], {}
        self._pool = self.device.device.events
        self._synchronize, self._pool.synchronize = self._pool.synchronize, self._wait

    def _wait(self, raw, timeout):
        number = self._events.get(id(raw))
        if number is None:
            self.others.append(f"a wait after the launch of step {self.steps - 1}")
        else:
            self.waits.append((number, self.steps - 1))
        return self._synchronize(raw, timeout)

    def launch(self, tasks):
        launched = super().launch(tasks)
        self._events[id(launched.ticket._copy._event.raw)] = launched.step.number
        return launched

    def take(self, launched):
        record = super().take(launched)
        self._events = {raw: number for raw, number in self._events.items() if number != launched.step.number}
        return record


def waits_of(*, overlap, drafts):
    """Run requests that enter, continue, are preempted and end; return the waits, and the number of blocking calls."""
    schedule = Schedule(sizes_of(slots=3, drafts=drafts), 9, 4, [], [], None)
    player = Player(schedule, "lazy", overlap=overlap, options={"polls": 1 << 30}, stepper=Waits)
    player.open()
    counters = player.device.device.accelerator.counters
    before = counters()
    for number in range(5):
        params = SamplingParams(max_tokens=9)
        player.engine.submit(Request(f"r{number}", [number + 1] * 5, params))
    while player.engine.busy:
        player.engine.step()
    blocked = counters()["blocked_wait"] - before["blocked_wait"]
    stepper, steps = player.stepper, player.engine.steps
    found = list(stepper.waits), list(stepper.others), steps, blocked
    player.close()  # which waits for all work in flight
    return found


@pytest.mark.parametrize("drafts", [0, 2])
def test_every_wait_is_for_the_step_before_and_there_are_no_others(drafts):
    waits, others, steps, blocked = waits_of(overlap=True, drafts=drafts)
    assert others == []
    assert steps > STEPS
    assert waits == [(number, number + 1) for number in range(steps)], "a wait for the newest step, or none"
    assert blocked == steps


def test_without_overlap_the_newest_step_is_waited_for():
    waits, others, steps, blocked = waits_of(overlap=False, drafts=0)
    assert (others, waits, blocked) == ([], [(number, number) for number in range(steps)], steps)


def test_a_loop_that_waits_for_the_newest_step_is_noticed(monkeypatch):
    step = Engine.step

    def impatient(engine):
        ended = step(engine)
        engine.worker.in_flight[-1].ticket.record()
        return ended

    monkeypatch.setattr(Engine, "step", impatient)
    waits, _, _, _ = waits_of(overlap=True, drafts=0)
    assert any(number == newest for number, newest in waits)


def test_the_device_runs_a_step_while_the_next_is_launched():
    """With its stream held no step runs, and yet the next step is launched: the loop stops where it takes the first."""
    player = Player(Schedule(sizes_of(slots=2, drafts=0), 8, 8, [], [], None), "worker", overlap=True)
    player.open()
    device, engine = player.device.device, player.engine
    engine.submit(Request("r", [1, 2], SamplingParams(max_tokens=4)))
    with device.hold_stream(player.device.default_stream):
        engine.step()
        engine.workers[0].give()
        assert not player.stepper.in_flight[-1].ticket.ready()
        assert player.stepper.steps == 2
    while engine.busy:
        engine.step()
    player.close()
