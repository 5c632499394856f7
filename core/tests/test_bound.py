"""Binding a device, deferred errors, forks, and the names that every error contains."""

import functools
import gc
import logging
from dataclasses import replace

import numpy as np
import pytest
from hal_core import Group, Request, Task, TaskKind, admit, hookimpl
from hal_core.devices.base import DeviceBase
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice
from hal_core.devices.sync import SyncStream
from hal_core.errors import CapabilityMissing, DeviceClosed, InvalidValue, PluginError
from hal_core.runtime.bound import bind
from hal_core.slots.fields import StateConfig
from hal_core.tickets import DONE, PromiseTicket

SIZES = StateConfig(num_slots=4, max_model_len=32)


@pytest.fixture
def bound():
    device = bind(CpuPlugin.open(0, {}))
    yield device
    device.close()


class Late(CpuDevice):
    """A device whose writes end when the test lets them. ``kind``: the class of their tickets."""

    def __init__(self, kind=PromiseTicket):
        super().__init__(0, {})
        self.tickets, self.kind = [], kind

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        self.tickets.append(self.kind("async"))
        return self.tickets[-1]


def test_errors_of_a_device_that_is_dropped_without_a_close_are_logged(caplog):
    for waited in (False, True):
        caplog.clear()
        bound = bind(Late())
        tickets = [bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream) for _ in range(2)]
        tickets[0].complete(InvalidValue("the copy engine fell over"))
        if waited:
            with pytest.raises(InvalidValue):
                tickets[0].wait()
        del bound
        gc.collect()
        messages = [text for text in caplog.messages if "dropped" in text]
        assert len(messages) == (not waited)
        assert waited or "cpu:0 was dropped without a close" in messages[0]
        assert waited or "the copy engine fell over" in messages[0]


def test_of_several_unobserved_errors_the_first_names_the_rest():
    bound = bind(Late())
    for _ in range(3):
        bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)
    for ticket, what in zip(bound.device.tickets, ("first", "second", None), strict=True):
        ticket.complete(InvalidValue(what) if what else None)
    with pytest.raises(InvalidValue, match="first") as raised:
        bound.close()
    assert "second" in raised.value.__notes__[1]


class Queued(PromiseTicket):
    """A ticket of a stream. It counts how often one was asked."""

    order, queries = "a stream", 0

    def done(self):
        Queued.queries += 1
        return super().done()


def test_behind_a_long_queue_a_call_asks_one_ticket_of_each_stream():
    bound, before = bind(Late(Queued)), Queued.queries
    write = lambda: bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)  # noqa: E731
    for _ in range(300):
        write()
    assert Queued.queries - before == 299, "each call asked the first"
    for at, ticket in enumerate(bound.device.tickets[:200]):
        ticket.complete(InvalidValue("the copy engine fell over") if at == 150 else None)
    with pytest.raises(InvalidValue, match="fell over"):
        write()
    before = Queued.queries
    write()
    assert Queued.queries - before == 1
    bound.close()


def test_what_fails_while_the_device_is_closed_is_raised_too(monkeypatch):
    bound = bind(Late())
    for _ in range(2):
        bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)
    before, during = bound.device.tickets
    before.complete(InvalidValue("it had ended"))
    monkeypatch.setattr(bound.device, "close", lambda: during.complete(InvalidValue("it was under way")))
    with pytest.raises(InvalidValue, match="it had ended") as raised:
        bound.close()
    assert "it was under way" in raised.value.__notes__[1]
    bound.close()


def test_what_closing_meets_does_not_hide_the_error_that_is_under_way():
    bound = bind(Late())
    bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)
    bound.device.tickets[0].complete(InvalidValue("a consequence"))
    with pytest.raises(BrokenPipeError) as raised, bound:
        raise BrokenPipeError
    assert "a consequence" in raised.value.__notes__[0]
    with pytest.raises(DeviceClosed):
        bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)


def test_an_error_that_was_waited_for_is_not_raised_again():
    bound = bind(Late())
    ticket = bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)
    ticket.complete(InvalidValue("seen"))
    with pytest.raises(InvalidValue, match="seen"):
        ticket.wait()
    bound.close()


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (lambda self, device, target, value: DONE, "the contract is"),
        (lambda self, device, target, value, stream=None: DONE, "without defaults"),
        (lambda self, device, target, value, stream, extra: DONE, "extra"),
    ],
)
def test_an_implementation_with_other_parameters_is_refused(method, complaint):
    kind = type("Odd", (CpuDevice,), {"async_set_value": hookimpl(method)})
    with pytest.raises(PluginError, match=complaint):
        bind(kind(0, {}))


def test_a_device_without_a_hook_or_with_a_wrapper_is_refused():
    missing = type("Missing", (CpuDevice,), {"save_output": None})
    with pytest.raises(PluginError, match="save_output: 0 implementations"):
        bind(missing(0, {}))

    def wrapping(self, device, target, value, stream):
        return (yield)

    wrapper = type("Wrapper", (CpuDevice,), {"async_set_value": hookimpl(wrapper=True)(wrapping)})
    with pytest.raises(PluginError, match="may not wrap"):
        bind(wrapper(0, {}))


class ClaimsAsync(CpuDevice):
    """A device that declares ``async_h2d`` and keeps the core's ``copy_within``."""

    capabilities = replace(CpuDevice.capabilities, async_h2d=True)


class CopiesItself(ClaimsAsync):
    """The same, with a copy of its own."""

    def copy_within(self, target, value, stream):
        return super().copy_within(target, value, stream)


def test_async_h2d_with_the_default_copy_within_is_refused_with_the_cure():
    with pytest.raises(PluginError, match=r"^cpu:0: async_h2d is declared, but copy_within is the default") as refused:
        bind(ClaimsAsync(0, {}))
    assert refused.value.cure.startswith("write copy_within(target, value, stream)")
    bind(CopiesItself(0, {})).close()
    bind(CpuDevice(0, {})).close()


def test_properties_of_a_device_are_not_called_when_it_is_bound():
    """A device may import a framework that is missing: cuda did, and could not be opened without Paddle."""

    def called(self):
        raise ModuleNotFoundError("No module named 'paddle'")

    both = {"at_hand": property(called), "found_once": functools.cached_property(called)}
    bind(type("Lazy", (CpuDevice,), both)(0, {})).close()


def test_a_hook_that_returns_no_ticket_is_an_error_of_the_plugin():
    kind = type("Silent", (CpuDevice,), {"insert_tasks": hookimpl(lambda self, device, state, tasks, stream: 0)})
    bound = bind(kind(0, {}))
    state = bound.state(SIZES)
    task = Task(TaskKind.PREFILL, 0, admit(Request("r", [1, 2]), state.layout), num_scheduled_tokens=2, blocks=[0])
    with pytest.raises(PluginError, match="insert_tasks: the plugin's hook returned 0"):
        bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)
    assert not state.host_table.admission_ids.any()


def test_g07_one_log_record_for_each_opened_device(caplog):
    with caplog.at_level(logging.WARNING, "hal"):
        bound = bind(CpuPlugin.open(0, {}))
        for _ in range(3):
            bound.async_set_value(target=np.zeros(2), value=1.0, stream=bound.default_stream)
    assert len([r for r in caplog.records if "fallbacks" in r.message]) == 1


class Alone(CpuDevice):
    """Without collectives."""

    open_communicator = DeviceBase.open_communicator


def test_a_group_that_a_device_cannot_open_is_an_error_of_that_device():
    with bind(Alone(0, {})) as bound:
        assert (bound.index, bound.name) == (0, "cpu:0")
        with pytest.raises(CapabilityMissing) as raised:
            bound.communicator(group=Group((0, 1), 0))
        assert raised.value.device == "cpu:0"
    with pytest.raises(DeviceClosed):
        bound.communicator(group=Group((0, 1), 0))


def test_g26_a_stream_of_no_device_does_not_make_another_devices_valid(bound):
    other, view = bind(CpuPlugin.open(0, {})), bound.state(SIZES).view("step_idx")
    bound.async_set_value(target=view, value=1, stream=SyncStream(3))
    with pytest.raises(InvalidValue, match="another opened device"):
        bound.async_set_value(target=view, value=2, stream=other.default_stream)
    other.close()


@pytest.mark.parametrize("slots", [[-1], [4], [0, 9], [0.0], None, 2, "ab"])
def test_only_slots_of_the_state_can_be_released(bound, slots):
    state = bound.state(SIZES)
    task = Task(TaskKind.PREFILL, 3, admit(Request("r", [1, 2]), state.layout), 0, 2, [0])
    bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream).wait()
    with pytest.raises(InvalidValue) as raised:
        state.release(slots)
    assert raised.value.argument == "slots"
    assert raised.value.cure
    assert state.host_table.requests[3] is not None
