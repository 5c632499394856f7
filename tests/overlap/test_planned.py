"""A step that is planned from its predecessor equals one that is planned from scratch."""

import pytest
from hal_engine.stepping.step_plan import StepPlanner

from .drawn import draw
from .schedules import check, play
from .test_late_errors import Astray, played

pytestmark = pytest.mark.usefixtures("one_process")

SCHEDULES = 12


def watched(monkeypatch, *, ended=lambda given: given):
    """Compare every plan of the planners with one made from scratch; count the steps planned from a predecessor."""
    plan, planned, made, again = StepPlanner.plan, StepPlanner._planned, [], []
    monkeypatch.setattr(StepPlanner, "_planned", lambda *given: made.append(given) or planned(*given))

    def compared(planner, number, tasks, known):
        made.clear()
        found = plan(planner, number, tasks, ended(known))
        if not made:
            again.append(number)
        fresh = planned(planner, number, tasks, known)
        assert found.step.number == number
        assert found.tasks is tasks
        (name,) = fresh.step.orders
        assert found.step.order(name).tolist() == fresh.step.order(name).tolist()
        assert (found.counts.tolist(), found.decodes.tolist()) == (fresh.counts.tolist(), fresh.decodes.tolist())
        for one in ("spans", "speculative", "group", "logprobs", "errors", "recovered", "late_errors"):
            assert getattr(found.step, one) == getattr(fresh.step, one)
        return found

    monkeypatch.setattr(StepPlanner, "plan", compared)
    return again


def play_some(*, overlap):
    for number in range(SCHEDULES):
        schedule = draw(number)
        if schedule.loss is None:
            check(schedule, play(schedule, "lazy", overlap=overlap))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_planned_from_the_one_before_is_as_if_planned_anew(monkeypatch, overlap):
    again = watched(monkeypatch)
    play_some(overlap=overlap)
    assert again, "no step was planned from the one before"


def test_a_plan_that_overlooks_whom_the_host_has_stopped_is_noticed(monkeypatch):
    watched(monkeypatch, ended=lambda _: set())
    with pytest.raises(AssertionError):
        played(fails=Astray, overlap=True, drafts=0)
