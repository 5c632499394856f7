"""The loop of an engine process, with a simulated caller: its input, checks and reports."""

from array import array

import pytest
from hal_core import FinishReason, GroupLost, SamplingParams, StateConfig
from hal_engine.distributed.control_messages import Abort, Ended, Stats, Stop, Submit
from hal_engine.engine import Engine
from hal_engine.generation.process import serve_requests

from tests.engine.test_scheduler import PaperWorker

BLOCKS = 12


class Caller:
    """Sends each message before the step of its number, and stops before step ``until``; ``free``: free blocks and
    slots before each step.
    """

    def __init__(self, engine, until, messages):
        self.engine, self.until, self.messages, self.stats = engine, until, list(messages), []
        self.turn, self.free, self.heard, self.open = -1, [], [], False

    def receive(self, timeout):
        if self.open and self.messages and self.messages[0][0] <= self.turn:
            return self.messages.pop(0)[1]
        if self.open:
            self.open = False
            return None
        self.turn, self.open = self.turn + 1, True
        scheduler = self.engine.scheduler
        self.free.append((scheduler.pool.free, len(scheduler._slots)))
        assert self.turn or timeout, "an engine without requests waits"
        return Stop() if self.turn == self.until else self.receive(timeout)

    def send(self, message, patience=0.0):
        (self.stats if isinstance(message, Stats) else self.heard).append(message)
        return True


def serve(until, *messages, slots=2):
    engine = Engine(PaperWorker(StateConfig(num_slots=slots, max_model_len=24, block_size=4), BLOCKS))
    caller = Caller(engine, until, messages)
    serve_requests(caller, engine)
    return caller, engine


def submit(name, prompt=(1, 2, 3), most=12):
    return Submit(name, array("i", prompt).tobytes(), SamplingParams(max_tokens=most))


def test_slot_and_blocks_are_free_two_steps_after_an_abort():
    caller, engine = serve(8, (0, submit("a")), (3, Abort("a")))
    assert caller.free[3] < (BLOCKS, 2)
    assert caller.free[5] == (BLOCKS, 2)
    assert not engine.busy


def test_a_request_is_checked_by_the_process_and_refused_there():
    caller, _ = serve(4, (0, submit("none", [])), (0, submit("large", [1] * 20)), (0, submit("good")))
    answers = {word.request: word for word in caller.heard}
    assert answers.keys() == {"none", "large"}
    assert all(word.reason == FinishReason.ERROR and word.message for word in answers.values())
    assert "the prompt has no tokens" in answers["none"].message


def test_an_end_that_no_record_has_is_reported():
    caller, _ = serve(4, (0, submit("a")), (0, submit("b")), (1, Abort("b")), slots=1)
    assert caller.heard == [Ended("b", 0, int(FinishReason.ABORT))]


def test_how_busy_the_engine_is_is_sent_with_its_first_step(monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_STATS", "1e-9")
    caller, _ = serve(4, (0, submit("a")), (0, submit("b")), (0, submit("c")))
    first = caller.stats[0]
    assert (first.running, first.waiting, first.steps, first.preemptions) == (2, 1, 1, 0)
    assert 0 < first.cache <= 1
    assert first.step_seconds > 0 < first.host_seconds
    assert [one.steps for one in caller.stats] == [*range(1, len(caller.stats) + 1)]


def test_turns_without_a_request_are_no_steps(monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_STATS", "1e-9")
    busy, _ = serve(4, (0, submit("a", most=3)))
    idle, _ = serve(30, (10, submit("a", most=3)), (20, submit("b", most=3)))
    first, last = busy.stats[-1], idle.stats[-1]
    assert (first.steps, last.steps) == (3, 6), "a step a token"
    before = idle.stats[0]
    assert (before.steps, before.step_seconds, before.host_seconds) == (0, 0.0, 0.0)
    assert len(idle.stats) <= 1 + 2 * 3, "figures that have not changed are not sent"


def test_without_its_caller_the_process_ends():
    class Gone(Caller):
        def receive(self, timeout):
            raise GroupLost("rank 0 gets no messages from the engine", argument="engine")

    engine = Engine(PaperWorker(StateConfig(num_slots=1, max_model_len=24, block_size=4), BLOCKS))
    with pytest.raises(GroupLost):
        serve_requests(Gone(engine, 1, ()), engine)


def test_the_requests_of_a_turn_are_admitted_by_one_call_and_each_refused_alone(monkeypatch):
    """One of them is aborted before its first step."""
    batches, admit_all = [], PaperWorker.admit_all
    monkeypatch.setattr(
        PaperWorker, "admit_all", lambda worker, given: batches.append(len(given)) or admit_all(worker, given)
    )
    names = [f"r{at}" for at in range(9)]
    messages = [(0, submit(name)) for name in names] + [(0, submit("long", range(40))), (0, Abort("r3"))]
    caller, engine = serve(60, *messages)
    assert [batch for batch in batches if batch] == [10]
    ends = {one.request: one for one in caller.heard if isinstance(one, Ended)}
    assert set(ends) >= {"long", "r3"}
    assert "40 tokens" in ends["long"].message
    assert ends["r3"].reason == int(FinishReason.ABORT)
    assert not engine.busy
