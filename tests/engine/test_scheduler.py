"""The scheduler with a simulated worker: every request ends once, with the oracle's tokens, whatever the sizes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import FinishReason, StateConfig
from hal_core.slots.layout import lay_out
from hal_core.slots.tasks import TaskKind
from hal_engine.engine import Engine, Limits, Scheduler
from hal_engine.engine.engine import local_worker
from hal_engine.engine.front import Queue
from hal_engine.engine.scheduler import SPARE
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

MAX_TOKENS, BLOCK = 24, 4


def next_token(tokens: list[int]) -> int:
    """The oracle: a token that depends on every token before it and on their number."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token + 7) % 97
    return value


class PaperWorker:
    """A simulated worker: ``insert_tasks`` of the cpu device checks each batch, and KV is a list of tokens a block.

    It fails by assertion when a block is in two requests, or when a token's KV is not where the table says.
    """

    sockets = ()
    drafts = (0, 0, 0)

    def __init__(self, sizes: StateConfig, blocks: int) -> None:
        self.device = bind(CpuPlugin.open(0, {}))
        self.state = self.device.state(sizes)
        self.host_table = self.state.host_table
        self.layout, self.blocks, self.vocab_size, self.chunk = self.state.layout, blocks, 100, None
        self.cache: dict[int, list[int]] = {block: [] for block in range(blocks)}
        self.tables: dict[int, list[int]] = {}
        self.known: dict[int, list[int]] = {}
        self.fed: dict[int, int] = {}
        self.fed_now = 0

    def admit(self, request):
        return self.state.admit(request, vocab_size=self.vocab_size)

    def admit_all(self, requests):
        return self.state.admit_all(requests, vocab_size=self.vocab_size)

    device_seconds = None

    def order(self, group, tasks, taken):
        self.came = group, self.step(tasks)

    def receive(self, timeout):
        return self.came

    def step(self, tasks):
        self.device.insert_tasks(state=self.state, tasks=tasks, stream=self.device.default_stream)
        rows = []
        for task in tasks:
            if task.kind in (TaskKind.PREEMPTED, TaskKind.ABORTED):
                aborted = task.kind is TaskKind.ABORTED
                status = SlotStatus.ABORTED if aborted else SlotStatus.PREEMPTED
                rows.append((task.request.request_id, status, FinishReason.ABORT if aborted else 0, None))
                self.leave(task.slot)
        lengths = {}
        for task in tasks:
            if task.kind is TaskKind.PREFILL:
                self.tables[task.slot], self.known[task.slot] = [], task.request.tokens.tolist()
                self.fed[task.slot] = 0
            if task.kind in (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS):
                assert task.first_block == len(self.tables[task.slot])
                self.tables[task.slot] += task.blocks
            if task.kind in (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK):
                assert task.num_computed_tokens == self.fed[task.slot]
                lengths[task.slot] = task.num_scheduled_tokens
        held = [block for table in self.tables.values() for block in table]
        assert len(set(held)) == len(held), "a block is in two requests"
        rows += self.run(lengths)
        self.host_table.reported(range(self.layout.sizes.num_slots))
        return self.record(rows)

    def run(self, lengths):
        rows, total = [], 0
        for slot in list(self.tables):
            known, fed, request = self.known[slot], self.fed[slot], self.host_table.requests[slot]
            waiting = fed < request.total and slot not in lengths
            length = 0 if waiting else lengths.get(slot, 1)
            total += length
            for at in range(fed, fed + length):
                block = self.cache[self.tables[slot][at // BLOCK]]
                del block[at % BLOCK :]
                block.append(known[at])
            self.fed[slot] = fed + length
            if waiting or self.fed[slot] < len(known):
                continue
            cached = [self.cache[self.tables[slot][at // BLOCK]][at % BLOCK] for at in range(len(known))]
            assert cached == known, "the paged cache lost a token"
            known.append(next_token(cached))
            finish = len(known) - request.prompt_len >= request.params.max_tokens
            rows.append((request.request_id, SlotStatus.TOKEN, FinishReason.LENGTH if finish else 0, known[-1]))
            if finish:
                self.leave(slot)
                self.state.release([slot])
        self.fed_now = total
        return rows

    def leave(self, slot):
        del self.tables[slot], self.known[slot], self.fed[slot]

    def record(self, rows):
        n = len(rows)
        tokens = [token for *_, token in rows if token is not None]
        return OutputRecord(
            0,
            tuple(row[0] for row in rows),
            np.array([row[1] for row in rows], np.uint8),
            np.array([row[2] for row in rows], np.uint8),
            np.zeros(n, np.int64),
            np.array([row[3] is not None for row in rows], np.int32),
            np.array(tokens, np.int64),
            np.zeros(n, np.bool_),
        )


def expected(prompt: list[int], count: int) -> tuple[int, ...]:
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return tuple(known[len(prompt) :])


prompts = st.lists(st.integers(0, 96), min_size=0, max_size=MAX_TOKENS + 2)
arrivals = st.tuples(prompts, st.integers(1, 10), st.integers(0, 12), st.integers(-1, 1))
"""Prompt, max_tokens, step of arrival, priority."""


@settings(max_examples=share.of(300), deadline=None)
@given(
    slots=st.integers(1, 5),
    blocks=st.integers(1, 16),
    chunk=st.integers(1, 40),
    room=st.none() | st.integers(1, 40),
    requests=st.lists(arrivals, min_size=1, max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 25)), max_size=3),
)
def test_every_request_ends_once_with_the_tokens_of_the_oracle(slots, blocks, chunk, room, requests, aborts):
    worker = PaperWorker(StateConfig(num_slots=slots, max_model_len=MAX_TOKENS, block_size=BLOCK), blocks)
    most_fed = None if room is None else slots + room
    engine = Engine(worker, Limits(chunk=chunk, step_tokens=most_fed))
    aborted, ended, step = set(), {}, 0
    while engine.busy or step < 26:
        for number, (prompt, most, arrival, priority) in enumerate(requests):
            if arrival == step:
                engine.submit(Request(f"r{number}", prompt, SamplingParams(max_tokens=most), priority=priority))
        for number, when in aborts:
            if when == step:
                engine.abort(f"r{number}")
                aborted.add(f"r{number}")
        busy = engine.scheduler.busy
        for finished in engine.step():
            assert finished.request_id not in ended, "a request ended twice"
            ended[finished.request_id] = finished
        if busy:
            assert worker.fed_now == engine.scheduler.launch_tokens <= min(chunk + slots, most_fed or chunk + slots)
        step += 1
        assert step < 1500, "the scheduler makes no progress"
    assert ended.keys() == {f"r{number}" for number in range(len(requests))}
    for number, (prompt, most, _, _) in enumerate(requests):
        finished = ended[f"r{number}"]
        needed = -(-(len(prompt) + most - 1) // BLOCK)
        fits = bool(prompt) and len(prompt) + most <= MAX_TOKENS and needed <= blocks
        if not fits:
            assert finished.reason is FinishReason.ERROR
            assert finished.message
        elif finished.reason is FinishReason.ABORT:
            assert finished.request_id in aborted
            assert finished.token_ids == expected(prompt, len(finished.token_ids))
        else:
            assert finished.reason is FinishReason.LENGTH
            assert finished.token_ids == expected(prompt, most)
    assert engine.scheduler.pool.free == blocks
    assert worker.tables == {}


def test_the_youngest_is_preempted_and_goes_on_where_it_was():
    worker = PaperWorker(StateConfig(num_slots=3, max_model_len=MAX_TOKENS, block_size=BLOCK), 6)
    engine = Engine(worker)
    for name in ("old", "middle", "young"):
        engine.submit(Request(name, [1, 2, 3], SamplingParams(max_tokens=18)))
    order = [finished.request_id for finished in engine.run()]
    assert engine.scheduler.preemptions > 0
    assert order == ["old", "middle", "young"]
    assert engine.scheduler.most_running == 3


def test_blocks_go_to_the_first_in_service_when_all_need_one():
    """A request of a lower priority that entered a step before needs a block at the same step; one is free."""
    worker = PaperWorker(StateConfig(num_slots=2, max_model_len=MAX_TOKENS, block_size=BLOCK), 5)
    engine, step, left = Engine(worker), worker.step, []

    def noted(tasks):
        left.extend(task.request.request_id for task in tasks if task.kind is TaskKind.PREEMPTED)
        return step(tasks)

    worker.step = noted
    engine.submit(Request("later", [1] * 6, SamplingParams(max_tokens=9), priority=1))
    engine.step()
    engine.submit(Request("first", [1] * 7, SamplingParams(max_tokens=9)))
    assert [finished.request_id for finished in engine.run()] == ["first", "later"]
    assert left == ["later"]
    assert engine.scheduler.pool.free == 5


@pytest.mark.parametrize(
    ("slots", "most", "blocks", "given"),
    [(1, 100, 200, [SPARE + 1] * 6), (1, 96, 200, [SPARE + 1] * 5 + [3]), (8, 12, 32, [1] * 16)],
    ids=["many free", "up to the limit", "few free"],
)
def test_a_growing_request_gets_spare_blocks_while_many_are_free(slots, most, blocks, given):
    worker = PaperWorker(StateConfig(num_slots=slots, max_model_len=4 + most, block_size=BLOCK), blocks)
    engine, step, grown = Engine(worker), worker.step, []

    def noted(tasks):
        grown.extend(len(task.blocks) for task in tasks if task.kind is TaskKind.MORE_BLOCKS)
        return step(tasks)

    worker.step = noted
    for number in range(slots):
        engine.submit(Request(f"r{number}", [1, 2, 3, number], SamplingParams(max_tokens=most)))
    for one in engine.run():
        assert one.token_ids == expected([1, 2, 3, int(one.request_id[1:])], most)
    assert grown == given
    assert engine.scheduler.pool.free == blocks


@pytest.mark.parametrize(("drafts", "piece"), [(0, 11), (3, 5)])
def test_a_steps_budget_counts_the_drafts_that_decoding_requests_may_have(drafts, piece):
    """Two of them, with room for three drafts each, launch eight tokens of thirteen, whatever their lengths are."""
    sizes = StateConfig(num_slots=3, max_model_len=MAX_TOKENS, block_size=BLOCK, max_draft_tokens=drafts)
    scheduler = Scheduler(lay_out(sizes), 30, limits=Limits(step_tokens=13), overlap=True)
    for name in ("a", "b"):
        scheduler.add(Request(name, [1], SamplingParams(max_tokens=8)))
    scheduler.schedule()
    scheduler.add(Request("c", [1] * 20, SamplingParams(max_tokens=1)))
    (entering,) = [task for task in scheduler.schedule() if task.kind == TaskKind.PREFILL]
    assert entering.num_scheduled_tokens == piece
    assert scheduler.launch_tokens == 13


def test_a_budget_that_leaves_nothing_to_prompts_is_refused():
    sizes = StateConfig(num_slots=2, max_model_len=MAX_TOKENS, block_size=BLOCK, max_draft_tokens=3)
    with pytest.raises(InvalidValue, match=r"8 tokens a step leave none .* \(give at least 9"):
        Scheduler(lay_out(sizes), 12, limits=Limits(step_tokens=8))


def test_a_step_decodes_everybody_and_feeds_a_piece_of_the_prompts():
    sizes = StateConfig(num_slots=2, max_model_len=MAX_TOKENS, block_size=BLOCK)
    scheduler = Scheduler(lay_out(sizes), 12, limits=Limits(chunk=5))
    worker = PaperWorker(sizes, 12)
    scheduler.add(Request("a", [1], SamplingParams(max_tokens=9)))
    scheduler.add(Request("b", list(range(10)), SamplingParams(max_tokens=9)))
    lengths = []
    for _ in range(4):
        tasks = scheduler.schedule()
        lengths.append([task.num_scheduled_tokens for task in tasks if task.request.request_id == "b"])
        scheduler.update(worker.step(tasks))
    assert lengths == [[4], [5], [1], []]


def test_more_requests_than_slots_wait_in_order():
    worker = PaperWorker(StateConfig(num_slots=1, max_model_len=MAX_TOKENS, block_size=BLOCK), 4)
    engine = Engine(worker)
    for number in range(5):
        engine.submit(Request(f"r{number}", [number + 1], SamplingParams(max_tokens=2)))
    assert [finished.request_id for finished in engine.run()] == [f"r{number}" for number in range(5)]
    assert engine.scheduler.most_running == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_lower_priorities_enter_first_and_equal_ones_in_order(groups):
    sizes = StateConfig(num_slots=1, max_model_len=MAX_TOKENS, block_size=BLOCK)
    worker = local_worker(PaperWorker(sizes, 6))
    schedulers = [worker.scheduler, Scheduler(worker.scheduler.layout, 6)][:groups]
    worker.take_steps(schedulers, overlap=False)
    front = Queue([worker], lambda ended: None)
    for number in range(groups):  # they take the slots
        front.add(Request(f"r{number}", [1], SamplingParams(max_tokens=8)))
        for scheduler in schedulers:
            scheduler.schedule()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        front.add(Request(name, [1], SamplingParams(max_tokens=8), priority=priority))
    waiting = [*front._waiting, *schedulers[0].waiting]
    assert [one.request_id for one in waiting] == ["c", "e", "a", "d", "b"]


def test_the_highest_priority_number_is_preempted_first():
    worker = PaperWorker(StateConfig(num_slots=3, max_model_len=MAX_TOKENS, block_size=BLOCK), 6)
    engine = Engine(worker)
    for name, priority in (("last", 2), ("first", 0), ("second", 1)):
        engine.submit(Request(name, [1, 2, 3], SamplingParams(max_tokens=18), priority=priority))
    order = [finished.request_id for finished in engine.run()]
    assert engine.scheduler.preemptions > 0
    assert order == ["first", "second", "last"]


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (Request("r", []), "the prompt has no tokens"),
        (Request("r", [1] * 20, SamplingParams(max_tokens=5)), "lower max_tokens to 4"),
        (Request("r", [1] * 12, SamplingParams(max_tokens=6)), "needs up to 5 KV blocks of 4 tokens, there are 4"),
        (Request("r", [100]), "outside the vocabulary"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_cure(request_, names):
    layout = lay_out(StateConfig(num_slots=2, max_model_len=MAX_TOKENS, block_size=BLOCK))
    scheduler = Scheduler(layout, 4, admit=partial(admit, layout=layout, vocab_size=100))
    with pytest.raises(InvalidValue, match=names):
        scheduler.add(request_)
    assert not scheduler.busy


def test_a_name_is_refused_until_its_request_has_ended():
    engine = Engine(PaperWorker(StateConfig(num_slots=1, max_model_len=MAX_TOKENS, block_size=BLOCK), 4))
    for most in (2, 3):
        engine.submit(Request("taken", [1], SamplingParams(max_tokens=most)))
    refused, ended = engine.run()
    assert "a request of that name has not ended yet" in refused.message
    assert (ended.reason, len(ended.token_ids)) == (FinishReason.LENGTH, 2)
    engine.submit(Request("taken", [1], SamplingParams(max_tokens=3)))
    assert [one.reason for one in engine.run()] == [FinishReason.LENGTH]


def test_an_abort_of_nobody_is_nothing_to_do():
    engine = Engine(PaperWorker(StateConfig(num_slots=1, max_model_len=MAX_TOKENS, block_size=BLOCK), 4))
    engine.abort("nobody")
    assert not engine.busy
    assert engine.step() == []


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True])
def test_the_budget_of_a_step_is_a_positive_count(chunk):
    with pytest.raises(InvalidValue, match="chunk"):
        Scheduler(lay_out(StateConfig(num_slots=1, max_model_len=8)), 1, limits=Limits(chunk=chunk))


@pytest.mark.parametrize(("prefers", "given", "chunk"), [(None, None, 256), (5, None, 5), (5, 7, 7), (None, 7, 7)])
def test_a_step_feeds_as_many_prompt_tokens_as_the_user_says_or_the_runner_prefers(prefers, given, chunk):
    worker = PaperWorker(StateConfig(num_slots=2, max_model_len=MAX_TOKENS, block_size=BLOCK), 8)
    worker.chunk = prefers
    assert Engine(worker, Limits(chunk=given)).scheduler.limits.prompt_tokens(0) == chunk
