"""Short answers: after an end by length the next request uses the slot without an idle step, after an end token with
one.
"""

from dataclasses import replace

import numpy as np
import pytest
from hal_core import FinishReason, InvalidBatch, PluginError, Request, SamplingParams, Task, TaskKind
from hal_engine.stepping import Stepper

from .drawn import Schedule, expected
from .schedules import Player, sizes_of
from .test_late_errors import FAILS_AT, Astray, Noting

pytestmark = pytest.mark.usefixtures("simulator")

SLOTS = 3


def requests(ends):
    """Requests of one to eight tokens."""
    return [Request(f"r{at}", [at % 11], SamplingParams(max_tokens=1 + at * 5 % 8, eos_token_ids=ends, seed=at))
            for at in range(24)]  # fmt: skip


def played(*, overlap, drafts=0, ends=()):
    """Count the steps, the idle slots while requests waited, and the requests that a token ended early."""
    player = Player(Schedule(sizes_of(slots=SLOTS, drafts=drafts), 30, 30, [], [], None), "lazy", overlap=overlap)
    player.open()
    for request in requests(ends):
        player.engine.submit(request)
    ended, early = {one.request_id: one for one in player.engine.run()}, []
    steps, stepper = player.engine.steps, player.stepper
    for request in requests(ends):
        tokens, reason = expected(request, player.schedule.sizes)
        assert (ended[request.request_id].token_ids, ended[request.request_id].reason) == (tokens, reason)
        if reason is FinishReason.STOP and len(tokens) < request.params.max_tokens:
            early.append(request.request_id)
    player.close()
    return steps, [name for number, name in stepper.idle if number <= stepper.entered or name in early], early


def test_an_end_by_length_costs_no_slot_a_step():
    waiting, overlapped = played(overlap=False), played(overlap=True)
    assert waiting[1:] == overlapped[1:] == ([], [])
    assert overlapped[0] == waiting[0], "besides the one that is launched before the last end is known, and not taken"


def test_an_end_by_a_token_costs_its_slot_one_step():
    _, idle, early = played(overlap=True, ends=(3, 5))
    assert sorted(idle) == sorted(early)
    assert len(early) > 5


def test_with_drafts_an_end_is_known_where_one_token_reaches_it():
    _, idle, _ = played(overlap=True, drafts=2)
    assert played(overlap=False, drafts=2)[1] == []
    assert len(idle) < 8, "of two more the end is known once the output of the step before is taken"
    assert len(idle) == len({*idle}), "one step is all that it costs"


def entering(stepper, name, block, *, most, fed=2):
    """A request of two tokens for the only slot, and the task that feeds that many of them."""
    request = Request(name, [1, 2], SamplingParams(max_tokens=most))
    admitted = stepper.admit(request)
    return request, admitted, Task(TaskKind.PREFILL, 0, admitted, 0, fed, [block])


@pytest.fixture
def stepper():
    """One slot, in which a request of three tokens has ended."""
    schedule = Schedule(sizes_of(slots=1, drafts=0), 8, 8, [], [], None)
    player = Player(schedule, "lazy", overlap=True, stepper=Stepper)
    player.open()
    _, _, earlier = entering(player.stepper, "earlier", 0, most=3)
    for tasks in [earlier], [], []:
        player.stepper.take(player.stepper.launch(tasks))
    yield player.stepper
    player.close()


def test_who_enters_behind_an_end_by_length_has_its_own_tokens(stepper):
    (former, _, first), (later, _, second) = (entering(stepper, name, 0, most=1) for name in ("former", "later"))
    before = stepper.launch([first])
    records = [stepper.take(one) for one in (before, stepper.launch([second]))]
    rows = [(record.request_ids, record.tokens.tolist()) for record in records]
    assert rows == [((one.request_id,), [*expected(one, stepper.state.sizes)[0]]) for one in (former, later)]


@pytest.mark.parametrize(
    ("most", "fed", "taken", "why"),
    [(2, 2, False, "the step gives one of two"), (1, 1, False, "none, of a prompt"), (2, 2, True, "there is no step")],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_slot_whose_request_goes_on_is_not_entered(stepper, most, fed, taken, why):
    """Whatever the scheduler requests, and whatever tokens the previous request received."""
    before = stepper.launch([entering(stepper, "former", 0, most=most, fed=fed)[2]])
    if taken:
        stepper.take(before)
    with pytest.raises(InvalidBatch, match="slot 0"):
        stepper.launch([entering(stepper, "later", 1, most=1)[2]])
    if not taken:
        stepper.take(before)


def test_who_leaves_by_a_task_is_not_freed_before_it(stepper):
    _, former, task = entering(stepper, "former", 0, most=1)
    before = stepper.launch([task])
    later, _, behind = entering(stepper, "later", 1, most=1)
    launched = stepper.launch([Task(TaskKind.ABORTED, 0, former), behind])
    stepper.take(before)
    assert stepper.take(launched).request_ids == ("former", later.request_id)


@pytest.fixture
def first_has_left():
    """An engine of one slot: "first" has left it, and its only token has not arrived; "second" waits."""
    player = Player(Schedule(sizes_of(slots=1, drafts=0), 8, 8, [], [], None), "lazy", overlap=True)
    player.open()
    for name in ("first", "second"):
        player.engine.submit(Request(name, [1, 2], SamplingParams(max_tokens=1)))
    player.engine.step()
    yield player.engine
    player.stepper.in_flight.clear()
    player.end()


def test_an_abort_of_who_has_left_comes_too_late(first_has_left):
    first_has_left.abort("first")
    (ended,) = first_has_left.step()
    assert (ended.request_id, ended.reason, len(ended.token_ids)) == ("first", FinishReason.LENGTH, 1)


def test_who_has_left_is_taken_back_where_its_step_is_lost(first_has_left):
    going_on, ended = first_has_left.scheduler.withdraw()
    assert ([one.request_id for one in going_on], ended) == (["first", "second"], [])


def test_a_step_that_gives_no_token_is_named_and_not_waited_for_ever(first_has_left):
    record = first_has_left.worker.in_flight[0].ticket.record()
    nothing, none = np.zeros(1, np.int32), np.zeros(1, np.uint8)
    with pytest.raises(PluginError, match="first"):
        first_has_left.scheduler.update(
            replace(record, counts=nothing, status=none, finish=none, tokens=record.tokens[:0])
        )


@pytest.mark.parametrize("most", [FAILS_AT + 1, FAILS_AT + 2])
def test_an_error_is_its_own_and_not_that_of_who_has_its_slot_next(most):
    """In its last step, while a new request is in its slot already, and in the step before, while its last is in
    flight.
    """
    schedule = Schedule(sizes_of(slots=2, drafts=0), 12, 8, [], [], None)
    player = Player(schedule, "lazy", overlap=True, stepper=Noting)
    player.open()
    player.stepper.runner = Astray(player.stepper.runner, player.device)
    given = [Request(f"r{at}", [at + 1], SamplingParams(max_tokens=each)) for at, each in enumerate((12, most, 6))]
    for request in given:
        player.engine.submit(request)
    ended, table = [], player.stepper.state.host_table
    try:
        while len(ended) < len(given):
            ended += player.engine.step()
            if table.requests[1] is not None and table.requests[1].request_id == "r2" and ended:
                assert player.stepper.state.failed == {}, "every record would be looked through for it"
    except BaseException:
        player._leave()
        raise
    tokens = {one.request_id: expected(one, schedule.sizes)[0] for one in given}
    assert {one.request_id: one.token_ids for one in ended} == tokens | {"r1": tokens["r1"][:FAILS_AT]}
    assert {one.request_id for one in ended if one.reason is FinishReason.ERROR} == {"r1"}
    player.close()
