"""One record for every path: drawn step outputs in a real state on the cpu device, against plain lists.

No product code makes most of these outputs yet, so the tests write the values that a step's kernels would write. The
oracle is a list of rows made while drawing; it shares no code with the builder of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.frames import envelope as frames
from hal_core.group import Group
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import FinishReason, SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import share

UNTIMED = settings(deadline=None, max_examples=share.of(60), suppress_health_check=[HealthCheck.too_slow])
DRAFTS, TOP = 3, 4
SIZES = StateConfig(num_slots=6, max_model_len=64, block_size=64, max_draft_tokens=DRAFTS, max_logprobs=TOP)
PARAMS = SamplingParams(max_tokens=40)
ids = st.integers(0, 1 << 40)
counted = {"token", "first"}


@dataclass
class Row:
    """The expected content of one row of the record."""

    request_id: str
    status: SlotStatus
    finish: FinishReason = FinishReason.NONE
    position: int = 0
    tokens: list = field(default_factory=list)
    first: bool = False
    drafts: list = field(default_factory=list)
    alternatives: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    ranks: list = field(default_factory=list)
    message: str = ""


@dataclass
class Slot:
    """The drawn content of one slot: requests removed since the last output, the present request, and its step
    output.
    """

    left: tuple[TaskKind, ...]
    what: str  # empty, chunk, token, first, error, recovered, beyond
    role: SplitRole
    tokens: list
    before: int  # tokens generated before this step
    finish: FinishReason
    drafts: list


@st.composite
def drawn_slots(draw, *, speculative, whats=("empty", "chunk", "token", "first", "error", "recovered")):
    """Six slots."""
    found = []
    for _ in range(SIZES.num_slots):
        what = draw(st.sampled_from(whats), label="what")
        most = SIZES.max_accept if speculative and what == "token" else 1
        first = what == "first"
        found.append(
            Slot(
                draw(st.sampled_from([(), (), (TaskKind.PREEMPTED,), (TaskKind.ABORTED,), tuple(TaskKind)[4:]])),
                what,
                SplitRole.PREFILL if first else draw(st.sampled_from([SplitRole.MIXED, SplitRole.DECODE])),
                draw(st.lists(ids, min_size=1, max_size=most), label="tokens") if what in counted else [],
                0 if first else draw(st.integers(0, 9), label="generated before"),
                draw(st.sampled_from(list(FinishReason)[:3])) if what in counted else FinishReason.NONE,
                draw(st.lists(ids, max_size=DRAFTS), label="drafts"),
            )
        )
    return found


class Bench:
    """Return a state on the cpu device, filled from the slots, and the rows that its output must have."""

    def __init__(self, slots, *, speculative, logprobs=None, order=None):
        self.bound = bind(CpuPlugin.open(0, {}))
        self.state = self.bound.state(SIZES)
        self.stream = self.bound.default_stream
        self.sink = MemorySink()
        self.slots, self.speculative, self.logprobs = slots, speculative, logprobs
        self.order = list(range(SIZES.num_slots)) if order is None else list(order)
        for slot, drawn in enumerate(slots):
            self.fill(slot, drawn)
        self.write_outputs()

    def insert(self, *tasks):
        self.bound.insert_tasks(state=self.state, tasks=list(tasks), stream=self.stream).wait()

    def fill(self, slot, drawn):
        """Insert requests into the slot and remove them; the last one remains unless the slot is empty."""
        leaver = None
        for kind in drawn.left:
            leaver = admit(Request(f"left-{slot}-{kind.name}", [1]), self.state.layout)
            self.insert(Task(TaskKind.PREFILL, slot, leaver, 0, 1, [slot]))
            self.insert(Task(kind, slot, leaver))
        if drawn.what != "empty":
            request = Request(f"in-{slot}", [1, 2], PARAMS, role=drawn.role)
            self.insert(Task(TaskKind.PREFILL, slot, admit(request, self.state.layout), 0, 2, [slot]))

    def write_outputs(self):
        """Write the output fields as a step's kernels leave them; slots that report no output contain garbage."""
        n, most = SIZES.num_slots, SIZES.max_accept
        self.columns = {
            "accept_num": np.full((n, 1), 2, np.int32),
            "step_idx": np.full((n, 1), 7, np.int64),
            "stop_reason": np.full((n, 1), 2, np.int32),
            "draft_num": np.zeros((n, 1), np.int32),
            "draft_tokens": np.full((n, DRAFTS), 666, np.int64),
            "accept_tokens": np.full((n, most), 666, np.int64),
            "sampled_token_ids": np.full((n, 1), 666, np.int64),
            "topk_token_ids": np.arange(n * most * (TOP + 1), dtype=np.int64).reshape(n, -1),
            "topk_logprobs": -np.arange(n * most * (TOP + 1), dtype=np.float32).reshape(n, -1) / 8,
            "topk_ranks": np.arange(n * most, dtype=np.int32).reshape(n, -1),
        }
        for slot, drawn in enumerate(self.slots):
            if drawn.what == "empty":
                continue
            count = 9 if drawn.what == "beyond" else len(drawn.tokens)
            self.columns["accept_num"][slot] = count
            self.columns["step_idx"][slot] = drawn.before + len(drawn.tokens)
            self.columns["stop_reason"][slot] = drawn.finish
            self.columns["draft_num"][slot] = len(drawn.drafts)
            self.columns["draft_tokens"][slot, : len(drawn.drafts)] = drawn.drafts
            target = "accept_tokens" if self.speculative else "sampled_token_ids"
            self.columns[target][slot, : len(drawn.tokens)] = drawn.tokens
            alternatives = self.columns["topk_token_ids"][slot].reshape(most, TOP + 1)
            alternatives[: len(drawn.tokens), 0] = drawn.tokens
        for name, values in self.columns.items():
            target = self.state.view(name)
            self.bound.async_set_value(target=target, value=values, stream=self.stream).wait()

    def step(self, **changes):
        told = {"error": "errors", "recovered": "recovered"}
        texts = {"errors": {}, "recovered": {}}
        for slot, drawn in enumerate(self.slots):
            if drawn.what in told:
                texts[told[drawn.what]][slot] = f"{drawn.what} in {slot}"
        order = {"target": np.array(self.order, np.int32)}
        arguments = {"speculative": self.speculative, "logprobs": self.logprobs} | texts | changes
        return Step(4, order, **arguments)

    def save(self, **changes):
        return self.bound.save_output(state=self.state, step=self.step(**changes), sink=self.sink, stream=self.stream)

    def record(self):
        self.save().wait(10)
        return self.sink.records[-1]

    def expected(self):
        """Return the rows and their batch ids."""
        rows, batch_ids = [], []
        for batch_id, slot in enumerate(self.order):
            drawn = self.slots[slot]
            for kind in drawn.left:
                aborted = kind is TaskKind.ABORTED
                status = SlotStatus.ABORTED if aborted else SlotStatus.PREEMPTED
                finish = FinishReason.ABORT if aborted else FinishReason.NONE
                rows.append(Row(f"left-{slot}-{kind.name}", status, finish))
                batch_ids.append(batch_id)
            if drawn.what != "empty":
                rows.append(self.own_row(slot, drawn))
                batch_ids.append(batch_id)
        return rows, batch_ids

    def own_row(self, slot, drawn):
        row = Row(f"in-{slot}", SlotStatus.NONE, position=drawn.before)
        if drawn.what in counted:
            row.status, row.finish, row.tokens = SlotStatus.TOKEN, drawn.finish, drawn.tokens
            row.first = drawn.what == "first"
            row.drafts = drawn.drafts if row.first and self.speculative else []
            if self.logprobs is not None:
                count, width = len(drawn.tokens), self.logprobs + 1
                shape = (SIZES.max_accept, TOP + 1)
                row.alternatives = self.columns["topk_token_ids"][slot].reshape(shape)[:count, :width].tolist()
                row.logprobs = self.columns["topk_logprobs"][slot].reshape(shape)[:count, :width].tolist()
                row.ranks = self.columns["topk_ranks"][slot, :count].tolist()
        elif drawn.what in ("error", "recovered"):
            row.status = SlotStatus.ERROR if drawn.what == "error" else SlotStatus.RECOVERED
            row.finish, row.message = FinishReason.ERROR, f"{drawn.what} in {slot}"
        return row


def rows_of(record):
    """Return the record's rows as plain values."""

    def listed(array):
        return [] if array is None else array.tolist()

    return [
        Row(
            row.request_id,
            row.status,
            row.finish,
            row.position,
            row.tokens.tolist(),
            row.first_token,
            listed(row.drafts),
            listed(row.logprob_token_ids),
            listed(row.logprobs),
            listed(row.ranks),
            row.message,
        )
        for row in record.rows()
    ]


def over_the_wire(record):
    return frames.decode(frames.encode(record, session=1, sender=0, sequence=1)).record


@UNTIMED
@given(st.data(), st.booleans(), st.none() | st.integers(0, TOP), st.permutations(range(SIZES.num_slots)))
def test_g19_g20_g22_g24_every_path_is_the_same_record(data, speculative, logprobs, order):
    """Plain, top-k, speculative, first token, chunk, preempted, aborted, recovered, error, and any mixture."""
    bench = Bench(
        data.draw(drawn_slots(speculative=speculative)), speculative=speculative, logprobs=logprobs, order=order
    )
    ticket = bench.save()
    ticket.wait(10)
    record = over_the_wire(bench.sink.records[-1])
    rows, batch_ids = bench.expected()
    assert rows_of(record) == rows
    assert list(ticket.batch_ids) == batch_ids
    assert ticket.batch_size == SIZES.num_slots
    assert ticket.ready()
    after = rows_of(bench.record())
    assert not [row for row in after if row.status in (SlotStatus.PREEMPTED, SlotStatus.ABORTED)]  # reported once


def last_tokens(slot):
    """The tokens of a slot's request so far, for proposers that copy from them."""
    return [*slot.tokens, *reversed(slot.tokens)]


#: Each proposer's content of the draft fields of a running slot. Records contain only a prefill's drafts.
PROPOSERS = {
    "none": lambda slot: [],
    "naive": lambda slot: slot.tokens[-1:],
    "ngram": lambda slot: last_tokens(slot)[1 : 1 + DRAFTS],
    "suffix": lambda slot: last_tokens(slot)[-DRAFTS:],
    "mtp": lambda slot: [token + 1 for token in slot.tokens][:DRAFTS],
}


@UNTIMED
@given(drawn_slots(speculative=True, whats=("token", "chunk")), st.none() | st.integers(0, TOP))
def test_g25_every_proposer_goes_through_the_same_record(slots, logprobs):
    records = {}
    for name, proposes in PROPOSERS.items():
        for slot in slots:
            slot.drafts = proposes(slot)
        records[name] = Bench(slots, speculative=True, logprobs=logprobs).record()
    assert all(record == records["none"] for record in records.values())


@UNTIMED
@given(drawn_slots(speculative=False), st.none() | st.integers(0, TOP))
def test_g25_plain_decoding_is_speculation_that_accepts_one_token(slots, logprobs):
    for slot in slots:
        slot.drafts = []
    plain = Bench(slots, speculative=False, logprobs=logprobs).record()
    speculative = Bench(slots, speculative=True, logprobs=logprobs).record()
    assert rows_of(plain) == rows_of(speculative)


@UNTIMED
@given(drawn_slots(speculative=True, whats=("first",)), st.integers(0, TOP))
def test_g24_a_prefill_nodes_drafts_and_logprobs_align_with_token_0(slots, logprobs):
    record = over_the_wire(Bench(slots, speculative=True, logprobs=logprobs).record())
    for slot, row in zip(slots, [row for row in record.rows() if row.request_id.startswith("in-")], strict=True):
        assert row.first_token
        assert row.tokens.tolist() == slot.tokens
        assert row.drafts.tolist() == slot.drafts
        assert row.logprob_token_ids.shape == (1, logprobs + 1)
        assert row.logprob_token_ids[0, 0] == slot.tokens[0]
    assert record.counts.sum() == len(record.tokens) == SIZES.num_slots


@pytest.mark.parametrize("speculative", [False, True])
def test_g19_a_batch_that_was_preempted_as_a_whole_is_reported(speculative):
    slots = [
        Slot((TaskKind.PREEMPTED,), "empty", SplitRole.MIXED, [], 0, FinishReason.NONE, [])
        for _ in range(SIZES.num_slots)
    ]
    bench = Bench(slots, speculative=speculative, logprobs=2)
    record = over_the_wire(bench.record())
    assert record.status.tolist() == [SlotStatus.PREEMPTED] * SIZES.num_slots
    assert record.deliveries() == [(f"left-{slot}-PREEMPTED", 0, 0) for slot in range(SIZES.num_slots)]
    assert len(bench.record()) == 0  # reported once


@UNTIMED
@given(drawn_slots(speculative=True, whats=("token", "beyond", "empty")))
def test_g21_device_values_out_of_bounds_are_error_rows_and_raised(slots):
    bench = Bench(slots, speculative=True)
    ticket = bench.save()
    beyond = [slot for slot, drawn in enumerate(slots) if drawn.what == "beyond"]
    if beyond:
        with pytest.raises(InvalidValue, match=f"in-{beyond[0]}: 9 tokens"):
            ticket.wait(10)
    record = bench.sink.records[-1]
    wrong = [row.request_id for row in record.rows() if row.status is SlotStatus.ERROR]
    assert wrong == [f"in-{slot}" for slot in beyond]
    told = [token for drawn in slots for token in drawn.tokens]
    assert record.tokens.tolist() == told


def test_g17_g18_a_rank_that_does_not_send_cleans_up_all_the_same():
    slots = [Slot((TaskKind.PREEMPTED,), "token", SplitRole.MIXED, [5], 0, FinishReason.NONE, [])] * SIZES.num_slots
    bench = Bench(slots, speculative=True)
    bench.save(group=Group((0, 1), 1)).wait(10)
    assert bench.sink.records == []
    assert rows_of(bench.record()) == [row for row in bench.expected()[0] if row.status is SlotStatus.TOKEN]
