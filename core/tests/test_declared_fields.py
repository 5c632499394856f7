"""Invalid ``device.state(fields=…)`` calls, and differing declared tables of ranks and of requests."""

from dataclasses import replace

import pytest
from hal_core import Companion, InvalidBatch, Request, StateConfig, StateField, Task, TaskKind, admit, lay_out
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import host_view
from hal_core.errors import InvalidValue
from hal_core.runtime.bound import bind
from hal_core.slots.declared import table_with

SIZES = StateConfig(num_slots=4, max_model_len=16, block_size=4)
BIAS = StateField("bias", "float32", reset=2.5, groups="step_input", value="extra")
ROW = StateField("row", "int32", 3, reset=-1, value=lambda request: list(request.prompt))


@pytest.fixture
def bound():
    with bind(CpuPlugin.open(0, {})) as device:
        yield device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "temperature"}, "temperature is in the state already"),
        ({"name": "a b"}, "no identifier"),
        ({"dtype": "int7"}, "int7"),
        ({"width": 0}, "has the width 0"),
        ({"width": True}, "has the width True"),
        ({"width": "num_slots"}, "has the width 'num_slots' .*one of max_model_len"),
        ({"width": "vocab_size"}, "width vocab_size, which is 0"),
        ({"reset": "x"}, "cannot be: "),
        ({"reset": [1, 2]}, "has the reset value"),
        ({"dtype": "uint8", "reset": 256}, "cannot be: .*256"),
        ({"groups": "broadcasts"}, r"names the groups \['broadcasts'\] .*broadcast_speculative"),
        ({"groups": "broadcast_speculative"}, "the state has no drafts .*name the group broadcast"),
        ({"value": "params"}, "has the value 'params'"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_g26_a_field_that_cannot_be_is_refused_by_its_name(bound, change, message):
    with pytest.raises(InvalidValue, match=message) as raised:
        bound.state(SIZES, fields=[replace(BIAS, **change)])
    assert (raised.value.argument, bool(raised.value.cure)) == ("fields", True)


@pytest.mark.parametrize("fields", [[BIAS, BIAS], ["bias"], BIAS])
def test_g26_fields_that_clash_or_are_none_are_refused(bound, fields):
    with pytest.raises(InvalidValue, match="fields: "):
        bound.state(SIZES, fields=fields)


@pytest.mark.parametrize("group", ["output", "broadcast", "output_topk"])
def test_g26_a_companion_has_no_group_of_steps(bound, group):
    companions = [Companion("proposer", [replace(BIAS, groups=group)])]
    with pytest.raises(InvalidValue, match=f"bias is in {group}, and no step runs on a companion"):
        bound.state(SIZES, companions=companions)


def broken(request):
    raise KeyError("colour")


@pytest.mark.parametrize(
    ("field", "extra", "message"),
    [
        (BIAS, {}, r"bias: the request has no value .give Request.extra=.'bias': …"),
        (BIAS, {"bias": "x"}, "bias: the value is a str"),
        (BIAS, {"bias": [1.0, 2.0]}, "bias: 2 values are more than its width of 1"),
        (replace(BIAS, dtype="int8", reset=0), {"bias": 200}, "bias: the value has int 200"),
        (replace(BIAS, width=2), {"bias": 1.0}, "bias: float is no row"),
        (replace(BIAS, width=2), {"bias": [1, 2, 3]}, "bias: 3 values are more than its width of 2"),
        (BIAS, {"bias": 1, "bais": 2}, "extra has bais, but the state declares bias"),
        (ROW, {}, "row: 4 values are more than its width of 3"),
        (replace(ROW, value=broken), {}, "row: its function failed: KeyError: 'colour'"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_g26_a_value_that_does_not_fit_names_request_and_field(bound, field, extra, message):
    state = bound.state(SIZES, fields=[field])
    with pytest.raises(InvalidValue, match=message) as raised:
        state.admit(Request("r", [1, 2, 3, 4], extra=extra))
    assert raised.value.argument == "request 'r'"


def test_g26_an_extra_of_a_state_without_fields_is_refused(bound):
    with pytest.raises(InvalidValue, match="extra has bias, but the state declares no field"):
        bound.state(SIZES).admit(Request("r", [1], extra={"bias": 1}))
    with pytest.raises(InvalidValue, match="extra = 3"):
        Request("r", [1], extra=3)


def test_a_function_may_read_any_extra(bound):
    state = bound.state(SIZES, fields=[replace(BIAS, value=lambda request: request.extra.get("colour", 0.5))])
    for extra in ({}, {"colour": 1.5}):
        state.admit(Request("r", [1], extra=extra))


def test_g14_the_digest_tells_declared_tables_apart():
    changes = [{}, {"reset": 2.0}, {"kept": True}, {"dtype": "float64"}, {"width": 2}, {"groups": ""}, {"name": "tilt"}]
    digests = {lay_out(SIZES, table_with(SIZES, [replace(BIAS, **change)])).digest for change in changes}
    assert len(digests | {lay_out(SIZES).digest}) == len(changes) + 1


@pytest.mark.parametrize("change", [{"reset": 2.0}, {"value": lambda request: 1.0}, {"name": "tilt"}])
def test_a_request_of_another_table_is_refused_in_whole(bound, change):
    state, other = bound.state(SIZES, fields=[BIAS]), bound.state(SIZES, fields=[replace(BIAS, **change)], name="b")
    request = state.admit(Request("r", [1], extra={"bias": 1.0}))
    task = Task(TaskKind.PREFILL, 0, request, 0, 1, [0])
    with pytest.raises((InvalidValue, InvalidBatch), match="'r'"):
        bound.insert_tasks(state=other, tasks=[task], stream=bound.default_stream)
    assert other.host_table.live == {}


def test_a_request_that_was_not_packed_for_a_companion_is_refused(bound):
    state = bound.state(SIZES, companions=[Companion("proposer", [ROW], same_slots=True)])
    task = Task(TaskKind.PREFILL, 0, admit(Request("r", [1]), state.layout), 0, 1, [0])
    with pytest.raises(InvalidValue, match=r"'r' was not admitted for the companion 'proposer' .admit it with state"):
        bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)
    assert state.host_table.live == {}
    assert (host_view(state.view("request_serial")) == 0).all()


def test_one_companion_shares_the_slots_and_another_does_not(bound):
    state = bound.state(SIZES, companions=[Companion("proposer", [ROW], same_slots=True), "other"])
    task = Task(TaskKind.PREFILL, 1, state.admit(Request("r", [7, 8])), 0, 2, [0])
    bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream).wait()
    proposer, other = state.companions
    assert [[*one.host_table.live.values()] for one in (state, proposer, other)] == [[1], [1], [3]]
    assert host_view(proposer.view("row"))[1].tolist() == [7, 8, -1]
    assert host_view(other.view("prompt_lens"))[3, 0] == 2
