"""Observers: they see every hook call and the end of every ticket, and have no side effect."""

import logging
from time import monotonic_ns

import pluggy
import pytest
from hal_core import ALONE, Request, StateConfig, Step, Task, TaskKind, bind, hookimpl
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import InvalidValue
from hal_core.output.sinks import MemorySink
from hal_core.tickets import PromiseTicket

HOOKS = ("insert_tasks", "async_set_value", "broadcast_tokens", "save_output")


class Watcher:
    """Records every call with its arguments and result, and the end of every ticket."""

    def __init__(self):
        self.calls, self.ends = [], []

    def note(self, hook, **arguments):
        try:
            result = yield
        except BaseException as error:
            self.calls.append((hook, arguments, error))
            raise
        self.calls.append((hook, arguments, result))
        return result

    @hookimpl(wrapper=True)
    def insert_tasks(self, state, tasks, stream):
        return (yield from self.note("insert_tasks", state=state, tasks=tasks, stream=stream))

    @hookimpl(wrapper=True)
    def async_set_value(self, device, target, value):
        return (yield from self.note("async_set_value", device=device, target=target, value=value))

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, group):
        return (yield from self.note("broadcast_tokens", group=group))

    @hookimpl(wrapper=True)
    def save_output(self, step, sink):
        return (yield from self.note("save_output", step=step, sink=sink))

    def ticket_ended(self, hook, ticket, error):
        self.ends.append((hook, ticket, error))


class Breaking(CpuDevice):
    """The cpu device; once it is broken, its async_set_value raises."""

    broken = False

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        if self.broken:
            raise InvalidValue("the chip is gone", cure="look for it", argument="target")
        return super().async_set_value(device, target, value, stream)


@pytest.fixture
def bound():
    with bind(Breaking(0, {})) as device:
        yield device


def one_step(bound, state):
    """Call each hook once; return each result by name."""
    stream, sink = bound.default_stream, MemorySink()
    task = Task(TaskKind.PREFILL, 1, state.admit(Request("r", [5, 6])), num_scheduled_tokens=2, blocks=[3])
    step = Step(0, {"target": [1]})
    tickets = {
        "insert_tasks": bound.insert_tasks(state=state, tasks=[task], stream=stream),
        "async_set_value": bound.async_set_value(target=state.view("sampled_token_ids")[1], value=9, stream=stream),
        "broadcast_tokens": bound.broadcast_tokens(state=state, group=ALONE, stream=stream),
    }
    bound.update_inputs(state=state, step=step, stream=stream)
    tickets["save_output"] = bound.save_output(state=state, step=step, sink=sink, stream=stream)
    assert state.take(tickets["save_output"]).tokens.tolist() == [9]
    return tickets


def test_an_observer_sees_every_hook_call_with_arguments_and_ticket(bound):
    watcher = Watcher()
    bound.observe(watcher, name="watcher")
    assert bound.observers == ("watcher",)
    state = bound.state(StateConfig(num_slots=2, max_model_len=8))
    tickets = one_step(bound, state)
    seen = {hook: (arguments, result) for hook, arguments, result in watcher.calls}
    assert list(seen) == ["insert_tasks", "async_set_value", "save_output"], "a group of one never reaches the device"
    for hook, (_, result) in seen.items():
        assert result is tickets[hook], f"{hook}: the caller's own ticket"
    assert seen["insert_tasks"][0]["state"] is state
    assert seen["insert_tasks"][0]["tasks"].requests[0].request_id == "r"
    assert seen["async_set_value"][0]["device"] is bound.device
    assert seen["save_output"][0]["step"].number == 0


def test_the_end_of_each_ticket_is_reported_once_to_who_wants_to_know(bound):
    watcher = Watcher()
    bound.observe(watcher)
    tickets = one_step(bound, bound.state(StateConfig(num_slots=2, max_model_len=8)))
    for ticket in tickets.values():
        ticket.wait()
        ticket.wait()
    bound.close()
    assert [(hook, error) for hook, _, error in watcher.ends] == [(hook, None) for hook in tickets]
    assert [ticket for _, ticket, _ in watcher.ends] == list(tickets.values())


class Late(CpuDevice):
    """A device whose insertion ends when the test lets it."""

    def __init__(self):
        super().__init__(0, {})
        self.tickets = []

    @hookimpl
    def insert_tasks(self, device, state, tasks, stream):
        super().insert_tasks(device, state, tasks, stream)
        self.tickets.append(PromiseTicket("async"))
        return self.tickets[-1]


@pytest.mark.parametrize("noticed_by", ["wait", "the next call", "close"])
def test_the_error_of_a_ticket_is_seen_when_the_ticket_ends(noticed_by):
    bound, watcher = bind(Late()), Watcher()
    bound.observe(watcher)
    state, stream = bound.state(StateConfig(num_slots=2, max_model_len=8)), bound.default_stream
    task = Task(TaskKind.PREFILL, 0, state.admit(Request("r", [5])), num_scheduled_tokens=1, blocks=[0])
    ticket = bound.insert_tasks(state=state, tasks=[task], stream=stream)
    assert watcher.ends == []
    error = OSError("the card fell off")
    ticket.complete(error)
    notice = {
        "wait": ticket.wait,
        "close": bound.close,
        "the next call": lambda: bound.async_set_value(target=state.view("seed")[0], value=1, stream=stream),
    }[noticed_by]
    with pytest.raises(OSError, match="fell off"):
        notice()
    assert watcher.ends == [("insert_tasks", ticket, error)]
    bound.close()
    assert len(watcher.ends) == 1


def test_an_observer_sees_the_error_of_a_call_that_the_device_raised(bound):
    watcher = Watcher()
    bound.observe(watcher)
    state, stream = bound.state(StateConfig(num_slots=2, max_model_len=8)), bound.default_stream
    bound.device.broken = True
    with pytest.raises(InvalidValue, match="the chip is gone") as raised:
        bound.async_set_value(target=state.view("seed")[0], value=1, stream=stream)
    assert watcher.calls[-1][2] is raised.value


class Troublemaker:
    """Wrappers that return another value, swallow errors, raise before or after, yield twice or never."""

    def __init__(self, how):
        self.how = how

    @hookimpl(wrapper=True)
    def async_set_value(self, target):
        if self.how == "raises before":
            raise ValueError("before")
        if self.how == "never yields":
            return None
        try:
            yield
        except Exception:
            if self.how == "swallows":
                return "nothing happened"
            raise
        if self.how == "raises after":
            raise ValueError("after")
        if self.how == "yields twice":
            yield
        return "something else"

    def ticket_ended(self, hook, ticket, error):
        if self.how == "raises at the end":
            raise ValueError("at the end")


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("returns something else", False),
        ("swallows", False),
        ("raises before", True),
        ("raises after", True),
        ("yields twice", True),
        ("never yields", True),
        ("raises at the end", True),
    ],
)
def test_an_observers_results_are_dropped_and_its_errors_reported_once(bound, caplog, how, reported):
    state, stream = bound.state(StateConfig(num_slots=2, max_model_len=8)), bound.default_stream
    view = state.view("seed")[0]
    plain = bound.async_set_value(target=view, value=1, stream=stream)
    bound.observe(Troublemaker(how), name="trouble")
    with caplog.at_level(logging.WARNING, "hal"):
        for value in (2, 3):
            assert bound.async_set_value(target=view, value=value, stream=stream) is plain
    bound.device.broken = True
    with caplog.at_level(logging.WARNING, "hal"), pytest.raises(InvalidValue, match="the chip is gone"):
        bound.async_set_value(target=view, value=4, stream=stream)
    assert view.memory.buffer[view.offset] == 3
    messages = [record.getMessage() for record in caplog.records if "observer trouble raised in" in record.getMessage()]
    assert len(messages) == (1 if reported else 0), messages


def test_several_observers_see_the_same_calls(bound):
    first, second = Watcher(), Watcher()
    bound.observe(first, name="first")
    bound.observe(second, name="second")
    one_step(bound, bound.state(StateConfig(num_slots=2, max_model_len=8)))
    assert [call[0] for call in first.calls] == [call[0] for call in second.calls] != []


class NoWrapper:
    @hookimpl
    def insert_tasks(self, device, state, tasks, stream):
        return None


class OneUnmarked(Watcher):
    def insert_tasks(self, tasks):
        return (yield)


class RaisingProperty(Watcher):
    @property
    def insert_tasks(self):
        raise OSError("no such file")


class Misspelt:
    @hookimpl(wrapper=True)
    def insert_task(self, tasks):
        return (yield)


class AsksTooMuch:
    @hookimpl(wrapper=True)
    def insert_tasks(self, tasks, rank):
        return (yield)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (object(), "has no wrapper of a hook, no ticket_ended, no called and no timed"),
        (NoWrapper(), "insert_tasks is not a wrapper"),
        (OneUnmarked(), "insert_tasks is not a wrapper"),
        (RaisingProperty(), "insert_tasks is not a wrapper"),
        (Misspelt(), "wraps insert_task, which is no hook"),
        (AsksTooMuch(), "asks for rank"),
    ],
)
def test_what_observes_nothing_is_refused_by_name(bound, plugin, message):
    with pytest.raises(InvalidValue, match=message) as raised:
        bound.observe(plugin)
    assert raised.value.cure
    assert bound.observers == ()


class Calls:
    """Records calls that are not hooks."""

    def __init__(self):
        self.seen = []

    def called(self, call, arguments):
        self.seen.append((call, arguments))
        raise OSError("the disk is full")


def test_other_calls_are_seen_once_they_have_succeeded(bound, caplog):
    calls = Calls()
    bound.observe(calls, name="calls")
    state, stream = bound.state(StateConfig(2, 16, max_draft_tokens=1)), bound.default_stream
    step = Step(0, {"target": [0]}, speculative=True)
    with pytest.raises(InvalidValue):
        bound.set_drafts(state=state, step=step, drafts={}, stream=stream)
    bound.update_inputs(state=state, step=step, stream=stream)
    bound.set_drafts(state=state, step=step, drafts={}, stream=stream)
    bound.order_after_reads(memory=state.memory, stream=stream)
    bound.broadcast_tokens(state=state, group=ALONE, stream=stream)  # a hook, which wrappers see
    names = [call for call, _ in calls.seen]
    assert names == ["state", "update_inputs", "set_drafts", "order_after_reads"]
    assert calls.seen[1][1]["step"] is step
    assert calls.seen[2][1].items() >= {"state": state, "step": step, "drafts": {}, "stream": stream}.items()
    assert calls.seen[3][1] == {"device": bound.device, "memory": state.memory, "stream": stream}
    assert caplog.text.count("observer calls raised in called") == 1


class Times:
    """Records all calls, hooks too."""

    def __init__(self):
        self.seen = []

    def timed(self, call, began, result, arguments):
        self.seen.append((call, began, result, arguments))
        raise OSError("the disk is full")


def test_every_call_is_timed_whether_it_succeeded_or_not(bound, caplog):
    times, began = Times(), monotonic_ns()
    bound.observe(times, name="times")
    state, stream = bound.state(StateConfig(num_slots=2, max_model_len=8)), bound.default_stream
    tickets = one_step(bound, state)
    bound.device.broken = True
    with pytest.raises(InvalidValue, match="the chip is gone"):
        bound.async_set_value(target=state.view("seed")[1], value=1, stream=stream)
    hooks = [(call, result) for call, _, result, _ in times.seen if call in HOOKS]
    assert hooks == [*tickets.items(), ("async_set_value", None)]
    assert [call for call, *_ in times.seen if call not in HOOKS] == ["state", "update_inputs"]
    assert [began for _, began, *_ in times.seen] == sorted({began, *(began for _, began, *_ in times.seen)})[1:]
    given = {call: arguments for call, *_, arguments in times.seen}
    assert given["save_output"][-4] is state
    assert given["save_output"][-3].number == 0
    assert given["async_set_value"][-2:] == (1, stream)
    assert caplog.text.count("observer times raised in timed") == 1


def test_an_observer_is_registered_once_under_a_name(bound):
    bound.observe(Watcher(), name="one")
    with pytest.raises(InvalidValue, match="observer one already observes the device"):
        bound.observe(Watcher(), name="one")


def test_every_call_passes_observers_only_if_there_are_some(bound, monkeypatch):
    def broken(**arguments):
        raise AssertionError("the observers' road")

    state, stream = bound.state(StateConfig(num_slots=2, max_model_len=8)), bound.default_stream
    view = state.view("seed")[0]
    bound.async_set_value(target=view, value=1, stream=stream)
    bound.observe(Watcher())
    for hook in HOOKS:
        monkeypatch.setattr(bound._observers.hooks, hook, broken)
    with pytest.raises(AssertionError, match="the observers' road"):
        bound.async_set_value(target=view, value=2, stream=stream)


def test_pluggy_says_who_observes(bound, monkeypatch):
    def broken(caller):
        raise AssertionError("pluggy's road")

    monkeypatch.setattr(pluggy.HookCaller, "get_hookimpls", broken)
    with pytest.raises(AssertionError, match="pluggy's road"):
        bound.observe(Watcher())


class Ordered:
    """Records its begin and end."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    @hookimpl(wrapper=True)
    def async_set_value(self, value=None):
        self.seen.append(f"{self.name} begins")
        yield
        self.seen.append(f"{self.name} ends")


class First(Ordered):
    @hookimpl(wrapper=True, tryfirst=True)
    def async_set_value(self):
        return (yield from super().async_set_value())


def test_observers_wrap_the_call_in_pluggys_order(bound):
    seen = []
    bound.observe(First("outermost", seen), name="a")
    bound.observe(Ordered("inner", seen), name="b")
    bound.observe(Ordered("outer", seen), name="c")
    bound.async_set_value(
        target=bound.state(StateConfig(num_slots=2, max_model_len=8)).view("seed")[0],
        value=1,
        stream=bound.default_stream,
    )
    order = ["outermost", "outer", "inner"]
    assert seen == [f"{name} begins" for name in order] + [f"{name} ends" for name in reversed(order)]


def test_a_hook_that_nobody_wraps_is_the_devices_own(bound):
    bound.observe(Ordered("one", []))
    assert bound._observers.hooks.insert_tasks == bound.device.insert_tasks
    assert bound._observers.hooks.async_set_value != bound.device.async_set_value
