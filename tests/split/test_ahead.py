"""A rank reports the output of each step once, and as soon as it is there: no further step is needed."""

from types import SimpleNamespace

from hal_engine.distributed.control_messages import Stop
from hal_engine.distributed.loop import StepLoop
from hal_engine.distributed.steps import StepOrder
from hal_engine.stepping import AsyncLoop


class Ticket:
    def __init__(self, number):
        self.number, self.is_ready = number, False

    def ready(self):
        return self.is_ready

    def record(self):
        return f"record {self.number}"


class Stepper:
    def __init__(self):
        self.launched = []

    def launch(self, tasks):
        number = len(self.launched)
        self.launched.append(SimpleNamespace(step=SimpleNamespace(number=number), ticket=Ticket(number), trouble=None))
        return self.launched[-1]

    def take(self, launched):
        return launched.ticket.record()


def test_a_step_that_is_done_before_anybody_waits_is_told_and_once():
    records, stepper = [], Stepper()
    ahead = AsyncLoop(stepper, records.append)
    ahead.step([], 0)
    ahead.tell()
    assert (records, ahead.untold) == ([], True)
    stepper.launched[0].ticket.is_ready = True
    assert ahead.untold
    assert not ahead.waiting
    ahead.tell()
    assert (records, ahead.untold) == (["record 0"], False)
    ahead.step([], 0)
    assert records == ["record 0"]
    ahead.idle()
    ahead.step([], 2)
    assert records == ["record 0", "record 1"]


class Channel:
    """Returns the given messages one by one."""

    rank = 0

    def __init__(self, *messages):
        self.messages = list(messages)

    def watch(self, sockets):
        pass

    def receive(self, timeout):
        return self.messages.pop(0)


class KvHandover:
    """Records its launches and records."""

    busy, transfer = False, SimpleNamespace(sockets=())

    def __init__(self):
        self.records = []

    def launch(self, tasks):
        self.records.append("launched")
        return {}

    def took(self, record, states):
        self.records.append(record)


def test_taken_steps_are_reported_before_the_tasks_that_follow():
    """Those may bring a request with the name of one that ended: the end belongs to the earlier one only."""
    stepper, handover = Stepper(), KvHandover()
    stepper.admit = stepper.runner = None
    channel = Channel(StepOrder(0, 1, (), 0), StepOrder(0, 2, (), 1), Stop())
    StepLoop(channel, stepper, 0, handover=handover).run(overlap=True, begins=lambda _: None, verdict=None)
    assert handover.records == ["launched", "record 0", "launched"]
