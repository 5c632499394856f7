"""A rank that is one step ahead of its engine frees exactly the slots that the engine knows to be free."""

import pytest
from hal_core import ALONE, InvalidBatch, Request, SamplingParams, Task, TaskKind
from hal_core.runtime.bound import bind
from hal_engine.stepping import AsyncLoop, Stepper
from hal_sim import SimPlugin

from .drawn import Schedule, expected
from .schedules import Later, sizes_of, stepper_of


@pytest.fixture
def stepper(simulator):
    schedule = Schedule(sizes_of(slots=1, drafts=0), 8, 8, [], [], None)
    with bind(SimPlugin.open(0, {"mode": "lazy", "staged": 0})) as device:
        yield stepper_of(device, schedule, Later(), ALONE, Stepper)


def entering(stepper, name, block):
    """A request of one token, in the only slot."""
    request = Request(name, [1, 2, 3], SamplingParams(max_tokens=1))
    return request, [Task(TaskKind.PREFILL, 0, stepper.admit(request), 0, 3, [block])]


def test_a_slot_that_the_engine_gives_away_is_free_before_the_next_step(stepper):
    """The engine has taken step 0, with which the first request ended, before it made step 1."""
    counts = []
    ahead = AsyncLoop(stepper, counts.append)
    (first, tasks), (second, others) = entering(stepper, "first", 0), entering(stepper, "second", 1)
    ahead.step(tasks, 0)
    with pytest.raises(InvalidBatch, match="slot 0"):
        stepper.device.insert_tasks(state=stepper.state, tasks=others, stream=stepper.stream)
    ahead.step(others, 1)
    ahead.idle()
    given = [(record.request_ids, record.tokens.tolist()) for record in counts]
    assert given == [((one.request_id,), [*expected(one, stepper.state.sizes)[0]]) for one in (first, second)]
