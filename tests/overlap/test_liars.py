"""Each mechanism of overlap is needed: schedules fail without it, and pass with it."""

import pytest
from hal_engine.engine.in_flight import InFlight
from hal_engine.engine.scheduler import Scheduler
from hal_engine.engine.slot_pool import SlotPool
from hal_engine.stepping.stepper import Stepper

from .drawn import draw
from .schedules import check, play

pytestmark = pytest.mark.usefixtures("one_process")

MOST = 100
"""Schedules that a liar may survive."""


def free_one_step_early(monkeypatch):
    monkeypatch.setattr(Scheduler, "one_stream", False)
    give_back = SlotPool.give_back

    def early(holdings, slot, blocks, **given):
        holdings.launched -= 1
        give_back(holdings, slot, blocks, **given)
        holdings.launched += 1

    monkeypatch.setattr(SlotPool, "give_back", early)


def match_by_name(monkeypatch):
    update = Scheduler.update

    def by_name(scheduler, record):
        scheduler._in_flight._find = lambda names, request_ids: [scheduler._live.get(name) for name in request_ids]
        scheduler._in_flight._over = lambda names, name: None
        return update(scheduler, record)

    monkeypatch.setattr(Scheduler, "update", by_name)


def reserve_nothing_for_the_next_step(monkeypatch):
    monkeypatch.setattr(Scheduler, "one_stream", False)
    monkeypatch.setattr(Scheduler, "_grow_ahead", lambda *given: None)


def _hand_on_with(monkeypatch, more):
    """As if each request that receives tokens in a step had so many more already."""
    hand_on = Scheduler._hand_on

    def hasty(scheduler):
        given = [(one, max(0, more(one))) for one in scheduler.running if one.pending]
        for one, count in given:
            one.generated += [0] * count
        hand_on(scheduler)
        for one, count in given:
            del one.generated[len(one.generated) - count :]

    monkeypatch.setattr(Scheduler, "_hand_on", hasty)


def hand_on_where_it_may_end(monkeypatch):
    _hand_on_with(monkeypatch, lambda one: one.pending - 1)  # as if each draft were accepted


def hand_on_before_the_last_step(monkeypatch):
    _hand_on_with(monkeypatch, lambda one: 1)


def resume_before_the_last_step_is_known(monkeypatch):
    preempt = Scheduler._preempt

    def hasty(scheduler, generation, tasks):
        preempt(scheduler, generation, tasks)
        generation.pending = 0
        scheduler._go_back()

    monkeypatch.setattr(Scheduler, "_preempt", hasty)


def write_over_what_is_copied_out(monkeypatch):
    launch = Stepper.launch

    def hasty(stepper, tasks):
        device = stepper.device.device
        device.order_after_reads, order = lambda *given: None, device.order_after_reads
        try:
            return launch(stepper, tasks)
        finally:
            device.order_after_reads = order

    monkeypatch.setattr(Stepper, "launch", hasty)


def drop_the_last_step_of_who_leaves(monkeypatch):
    find = InFlight._find

    def forgetful(stays, names, request_ids):
        stays._held = {key: one for key, one in stays._held.items() if one.slot >= 0 or one.aborted}
        return find(stays, names, request_ids)

    monkeypatch.setattr(InFlight, "_find", forgetful)


MISTAKES = (
    free_one_step_early,
    match_by_name,
    hand_on_where_it_may_end,
    hand_on_before_the_last_step,
    reserve_nothing_for_the_next_step,
    resume_before_the_last_step_is_known,
    write_over_what_is_copied_out,
    drop_the_last_step_of_who_leaves,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_noticed(mistake, monkeypatch):
    mistake(monkeypatch)
    for number in range(MOST):
        schedule = draw(number)
        if schedule.loss is None:
            try:
                check(schedule, play(schedule, "lazy", overlap=True))
            except Exception:  # noqa: BLE001 (an assertion, or what the device or the scheduler made of it)
                return
    pytest.fail(f"{MOST} schedules did not notice: {mistake.__name__}")
