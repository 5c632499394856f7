"""Batches of requests that enter, are handed over, continue or grow: bytes and bookings equal the cpu device's."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core import Request, SamplingParams, SplitRole, StateConfig, Task, TaskBatch, TaskKind
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidBatch
from hal_core.runtime.bound import bind
from hal_core.slots.checks import problems
from hal_cuda import insertion
from hal_cuda.driver import CudaError
from hal_cuda.structs import FEW_BYTES

from .states import contents

SIZES = StateConfig(num_slots=12, max_model_len=90, block_size=4, max_draft_tokens=2, max_stop_length=3)
CHUNK, GROW, HANDED = TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS, TaskKind.REMOTE_PREFILL


WAYS = {"uploaded": (0, 0), "read in place": (64 << 10, 0), "with the launch": (64 << 10, FEW_BYTES)}


@pytest.fixture(autouse=True, params=WAYS)
def way(request, monkeypatch):
    """Select how requests and entries reach the kernel on the native path."""
    near, few = WAYS[request.param]
    monkeypatch.setattr(insertion, "NEAR", near)
    monkeypatch.setattr(insertion, "FEW", few)
    return request.param


def blocks_for(tokens):
    return -(-tokens // SIZES.block_size)


def table_of(state):
    """Return the host's table without the admission ids, which differ from state to state."""
    table = state.host_table
    numbers = table.table.copy()
    numbers[:, 6] = numbers[:, 6] != 0
    return numbers.tolist(), sorted(table.live.values()), [r and r.request_id for r in table.requests]


class Pair:
    """The device under test and the cpu device, given the same tasks."""

    def __init__(self, bound):
        self.bounds = bound, bind(CpuPlugin.open(0, {}))
        self.states = [one.state(SIZES) for one in self.bounds]
        self.held: dict[int, list] = {}  # slot to its request, as each state has admitted it

    def batches(self, tasks):
        """The same tasks for each of the two states."""
        return [
            TaskBatch.of(
                [
                    Task(
                        kind,
                        slot,
                        admitted[at],
                        start,
                        length,
                        [slot % 1000 + 7 * n for n in range(count)],
                        first,
                        token,
                        d,
                    )
                    for kind, slot, admitted, start, length, count, first, token, d in tasks
                ]
            )
            for at in range(2)
        ]

    def insert(self, tasks):
        for bound, state, batch in zip(self.bounds, self.states, self.batches(tasks), strict=True):
            bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)

    def compare(self):
        got, expected = (contents(*one) for one in zip(self.bounds, self.states, strict=True))
        serials = [{0: 0} | {ad[at].admission_id: n for n, (ad, *_) in self.held.items()} for at in range(2)]
        for name, column in expected.items():
            mine = got[name]
            if name == "request_serial":
                mine, column = (
                    np.array([known.get(int(one), -1) for one in c[:, 0]])
                    for known, c in zip(serials, (mine, column), strict=True)
                )
            elif name in ("last_aborted",):
                mine, column = mine != 0, column != 0
            np.testing.assert_array_equal(mine, column, err_msg=name)
        assert table_of(self.states[0]) == table_of(self.states[1])


PLACES = {
    "kind": 0,
    "slot": 1,
    "admitted": 2,
    "start": 3,
    "length": 4,
    "blocks": 5,
    "first": 6,
    "token": 7,
    "drafts": 8,
}


@pytest.mark.parametrize("length", [9, 80])
def test_every_kind_of_task_that_enters_or_stays_in_one_batch(opened, length):
    """Fixed cases: hand-offs with and without drafts, pieces of prompts, growth by none and by two blocks."""
    pair, half, blocks = Pair(opened()), length // 2, blocks_for(length)
    requests = [[state.admit(Request(f"r{i}", [i] * length)) for state in pair.states] for i in range(8)]
    first = [
        (HANDED, i, one, length, 0, blocks, 0, i + 5, [7, 8][: i % 3])
        if i % 2
        else (TaskKind.PREFILL, i, one, 0, half, blocks, 0, -1, [])
        for i, one in enumerate(requests)
    ]
    second = [
        (GROW, i, one, 3, 4, i % 3, blocks, -1, [])
        if i % 2
        else (CHUNK, i, one, half, length - half, 1, blocks, -1, [])
        for i, one in enumerate(requests)
    ]
    pair.held = {i: [one] for i, one in enumerate(requests)}
    for tasks in (first, second):
        pair.insert(tasks)
        pair.compare()
    for state in pair.states:
        state.release([1])
    shorter = [state.admit(Request("shorter", [3] * 4)) for state in pair.states]
    pair.held[1] = [shorter]
    pair.insert([(HANDED, 1, shorter, 4, 0, 1, 0, 9, [])])
    pair.compare()


def test_a_batch_from_which_a_request_leaves_goes_by_the_general_way(opened):
    pair = Pair(opened())
    one, other = ([state.admit(Request(f"r{i}", [i] * 9)) for state in pair.states] for i in range(2))
    pair.insert([(HANDED, 0, one, 9, 0, 3, 0, 5, [])])
    calls = pair.bounds[0].device.driver.api.calls
    calls.clear()
    pair.insert([(TaskKind.ABORTED, 0, one, 0, 0, 0, 0, -1, []), (HANDED, 1, other, 9, 0, 3, 0, 5, [])])
    assert not [call for call in calls if call.startswith("hal_enter")]
    pair.held = {1: [other]}
    pair.compare()


NEVER = 2**31 - 1
VALUES = {
    "kind": [TaskKind.PREFILL, CHUNK, GROW, HANDED],
    "slot": [-1, 0, 1, 2, 3, 4, 12, 2**20, NEVER],
    "start": [-1, 0, 1, 4, 5, 8, 9, NEVER],
    "length": [-1, 0, 1, 4, 5, 9, NEVER],
    "blocks": [0, 1, 2, 3, 23, 30],
    "first": [-1, 0, 1, 2, 3, 4],
    "token": [-1, 0, NEVER],
    "drafts": [[], [3], [1, 2], [1, 2, 3], [-1]],
}


def test_g08_of_each_number_of_each_task_the_twin_says_what_the_core_says(opened):
    """Fixed cases: one number of one task of a valid batch at a time."""
    pair = Pair(opened())
    held, grown, new, handed = ([state.admit(Request(f"r{i}", [i] * 9)) for state in pair.states] for i in range(4))
    pair.insert([(TaskKind.PREFILL, 0, held, 0, 5, 2, 0, -1, []), (TaskKind.PREFILL, 1, grown, 0, 9, 3, 0, -1, [])])
    sound = [
        (CHUNK, 0, held, 5, 4, 1, 2, -1, []),
        (GROW, 1, grown, 0, 0, 1, 3, -1, []),
        (TaskKind.PREFILL, 2, new, 0, 9, 3, 0, -1, []),
        (HANDED, 3, handed, 9, 0, 3, 0, 5, [6]),
    ]
    table, verdicts = pair.states[0].host_table, set()
    for at in range(len(sound)):
        for name, values in VALUES.items():
            for value in values:
                tasks = [*map(list, sound)]
                tasks[at][PLACES[name]] = value
                batch = pair.batches(tasks)[0]
                found = problems(table, batch)
                assert table.twin.sound(batch) == (not found), (at, name, value, found)
                verdicts.add(not found)
    assert verdicts == {True, False}


def test_a_hand_off_that_no_state_can_take_is_refused_in_words(opened):
    bound = opened()
    state = bound.state(SIZES)
    wrong = {
        "its role is PREFILL": Request("p", [1] * 9, role=SplitRole.PREFILL),
        "has ended with its first token": Request("e", [1] * 9, SamplingParams(max_tokens=1)),
    }
    for words, request in wrong.items():
        task = Task(HANDED, 3, state.admit(request), 9, 0, [1, 2, 3], first_token=5)
        assert not state.host_table.twin.sound(TaskBatch.of([task]))
        with pytest.raises(InvalidBatch, match=words):
            bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)
    task = Task(HANDED, 3, state.admit(Request("g", [1] * 9)), 9, 0, [1, 2, 3], first_token=5, drafts=[-3])
    assert not state.host_table.twin.sound(TaskBatch.of([task]))
    with pytest.raises(InvalidBatch, match="drafts must be token ids"):
        bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)
    assert not state.host_table.live


@pytest.mark.parametrize("call", ["copy", "hal_enter", "hal_enter_few"])
def test_g08_a_failed_call_changes_nothing_of_what_the_host_knows(opened, way, call):
    bound = opened()
    state, api = bound.state(SIZES), bound.device.driver.api
    first, second = (state.admit(Request(f"s{i}", [i] * 9)) for i in range(2))
    bound.insert_tasks(state=state, tasks=[Task(HANDED, 0, first, 9, 0, [1, 2, 3], first_token=5)],
                       stream=bound.default_stream)  # fmt: skip
    before = table_of(state)
    tasks = [
        Task(GROW, 0, first, blocks=[7], first_block=3),
        Task(HANDED, 1, second, 9, 0, [1, 2, 3], first_token=5, drafts=[8]),
    ]
    kernel = "hal_enter_few" if way == "with the launch" else "hal_enter"
    fails = call == kernel or (call == "copy" and way == "uploaded")
    api.fail = call
    if fails:
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
        assert table_of(state) == before
    api.fail = ""
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
    got = contents(bound, state)
    assert got["next_tokens"][1, 0] == 5
    assert got["draft_tokens"][1].tolist() == [8, -1]
    assert got["token_ids"][1, 9] == 5
    assert got["blocks_num"][:2, 0].tolist() == [4, 3]
