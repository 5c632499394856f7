"""The worker on a device whose memory the host cannot touch: everything goes through the hooks and ``copy_out``."""

from dataclasses import replace

import numpy as np
import pytest
from hal_core.errors import HalError, InvalidBatch, SinkClosed, SinkFull, StateUnusable, Undelivered
from hal_core.memory.views import View
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import FinishReason, StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hal_engine.engine import Engine, Limits
from hal_paddle_runner.worker import Worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import share

SIZES = StateConfig(num_slots=3, max_model_len=32, block_size=4, max_logprobs=2, max_stop_length=3)
HOOKS = ("insert_tasks", "async_set_value", "broadcast_tokens", "update_inputs", "save_output")


def make(device, model, *, blocks=24, chunk=256, sink=None, sizes=SIZES):
    return Engine(Worker(device, model, sizes, blocks, sink or MemorySink()), Limits(chunk=chunk))


def rows_by_request(sink):
    rows = {}
    for record in sink.records:
        for row in record.rows():
            rows.setdefault(row.request_id, []).append(row)
    return rows


def delivered(sink):
    """Map each request id to its records' tokens, each at its position (G19)."""
    tokens = {}
    for name, rows in rows_by_request(sink).items():
        tokens[name] = ()
        for row in rows:
            if row.status is SlotStatus.TOKEN:
                assert row.position == len(tokens[name])
                tokens[name] += tuple(row.tokens.tolist())
    return tokens


class Untouchable(View):
    """A view that fails on any computation, any look inside, and any conversion to an array."""

    def _refuse(self, *_, **__):
        raise AssertionError("an operator was applied to the state")

    __add__ = __radd__ = __iadd__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = __invert__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = __mod__ = __pow__ = _refuse
    __setitem__ = __int__ = __float__ = __bool__ = __index__ = __iter__ = __len__ = __contains__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = __dlpack__ = numpy = item = tolist = _refuse
    __hash__ = None

    def __getitem__(self, index):
        return guarded(super().__getitem__(index))


def guarded(view):
    return Untouchable(view.memory, view.offset, view.shape, view.strides, view.dtype, view.owner)


def test_no_operator_is_applied_to_the_state(opaque, oracle, monkeypatch):
    """Neither worker nor engine computes on the state's tensors: views that raise, over memory that cannot be read."""
    engine = make(opaque, oracle, blocks=8, chunk=3)
    state = engine.worker.state
    views = {name: guarded(state.view(name)) for name in state.layout.fields}
    with pytest.raises(AssertionError, match="an operator was applied"):
        views["step_idx"] + 1
    # The policy takes View itself only; a plugin's value is resolved, as a framework's tensor would be.
    monkeypatch.setattr(
        opaque.device, "resolve", lambda v: View(v.memory, v.offset, v.shape, v.strides, v.dtype, v.owner)
    )
    monkeypatch.setattr(state, "view", views.__getitem__)
    prompts = {"a": [5, 6, 7, 8, 9], "b": [1], "c": [2, 3], "d": [4]}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=9, logprobs=1 if name == "b" else None, repetition_penalty=1.0)
        engine.submit(Request(name, prompt, params))
    ended = {finished.request_id: finished for finished in engine.run()}
    assert {name: e.token_ids for name, e in ended.items()} == {n: oracle.expected(p, 9) for n, p in prompts.items()}


def test_each_step_calls_the_hooks_in_order_and_copies_out_once(opaque, oracle, monkeypatch):
    engine = make(opaque, oracle, chunk=4)
    calls = opaque.device.calls
    for hook in HOOKS:
        if hook != "update_inputs":
            original = getattr(opaque, hook)

            def recorded(hook=hook, original=original, **arguments):
                opaque.device.calls.append(hook)
                return original(**arguments)

            monkeypatch.setattr(opaque, hook, recorded)
    engine.submit(Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=3)))
    for changes in (True, True, False, False):  # two pieces of its prompt, then tokens in blocks that it has
        engine.step()
        calls = opaque.device.calls
        # The second copy is save_output's own, of the output fields.
        assert calls == [*["insert_tasks"] * changes, "copy_out", *HOOKS[1:], "copy_out"]
        calls.clear()
    assert not engine.busy


requests_ = st.lists(
    st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=14), st.integers(1, 12), st.integers(0, 8)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=share.of(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.integers(1, 4),
    blocks=st.integers(7, 14),
    chunk=st.integers(1, 20),
    requests=requests_,
    aborts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 15)), max_size=2),
)
def test_tokens_are_the_models_whatever_the_sizes(opaque, oracle, slots, blocks, chunk, requests, aborts):
    """Every request ends once, and its records contain exactly its tokens, with preemptions and aborts (G19)."""
    sizes = StateConfig(num_slots=slots, max_model_len=32, block_size=4)
    engine = make(opaque, oracle, blocks=blocks, chunk=chunk, sizes=sizes)
    ended, step, preempted = {}, 0, 0
    while engine.busy or step < 16:
        for number, (prompt, most, arrival) in enumerate(requests):
            if arrival == step:
                engine.submit(Request(f"r{number}", prompt, SamplingParams(max_tokens=most)))
        for number, when in aborts:
            if when == step:
                engine.abort(f"r{number}")
        for finished in engine.step():
            assert finished.request_id not in ended
            ended[finished.request_id] = finished
        step += 1
    rows = rows_by_request(engine.worker.sink)
    for number, (prompt, most, _) in enumerate(requests):
        finished, of_request = ended[f"r{number}"], rows.get(f"r{number}", [])
        if finished.reason is FinishReason.LENGTH:
            assert finished.token_ids == oracle.expected(prompt, most)
        else:
            assert finished.reason is FinishReason.ABORT
            assert finished.token_ids == oracle.expected(prompt, len(finished.token_ids))
        assert delivered(engine.worker.sink).get(f"r{number}", ()) == finished.token_ids
        assert [row.finish for row in of_request if row.finish] == [finished.reason] * finished.reported
        preempted += sum(row.status is SlotStatus.PREEMPTED for row in of_request)
    assert preempted == engine.scheduler.preemptions
    assert engine.worker.state.host_table.requests == [None] * slots


def test_a_step_in_which_everybody_leaves_still_reports(opaque, oracle):
    """Each preemption and abort is reported once, also when no request runs (G19)."""
    sink = MemorySink()
    engine = make(opaque, oracle, sink=sink)
    for name in ("a", "b"):
        engine.submit(Request(name, [1, 2], SamplingParams(max_tokens=9)))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    ended = engine.step()
    assert [(e.request_id, e.reason) for e in ended] == [("a", FinishReason.ABORT), ("b", FinishReason.ABORT)]
    assert oracle.rows == [2]
    record = sink.records[-1]
    assert sorted(record.request_ids) == ["a", "b"]
    assert record.status.tolist() == [SlotStatus.ABORTED] * 2
    assert engine.worker.step([]).request_ids == ()


def test_logits_that_are_no_use_end_their_request_alone(opaque, oracle):
    oracle.nan_after = {7}
    engine = make(opaque, oracle)
    engine.submit(Request("good", [1], SamplingParams(max_tokens=4)))
    engine.submit(Request("bad", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9)))
    engine.submit(Request("fine", [9, 9], SamplingParams(max_tokens=4)))
    ended = {finished.request_id: finished for finished in engine.run()}
    assert ended["bad"].reason is FinishReason.ERROR
    assert "NaN" in ended["bad"].message
    assert ended["bad"].token_ids == oracle.expected([1, 2, 3, 4, 5], 2)
    assert ended["good"].token_ids == oracle.expected([1], 4)
    assert ended["fine"].token_ids == oracle.expected([9, 9], 4)
    engine.submit(Request("next", [3], SamplingParams(max_tokens=2)))  # the slot is free again
    assert [finished.token_ids for finished in engine.run()] == [oracle.expected([3], 2)]


def test_each_request_gets_its_logprobs(opaque, oracle):
    sink = MemorySink()
    engine = make(opaque, oracle, sink=sink)
    for name, wanted in (("none", None), ("own", 0), ("two", 2)):
        engine.submit(Request(name, [len(name)], SamplingParams(max_tokens=3, logprobs=wanted)))
    tokens = {finished.request_id: finished.token_ids for finished in engine.run()}
    rows = rows_by_request(sink)
    for name, wanted in (("none", -1), ("own", 0), ("two", 2)):
        known = [len(name)]
        for row, token in zip(rows[name], tokens[name], strict=True):
            logits = oracle.logits(known).astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum())
            ids, values = row.logprob_token_ids[0], row.logprobs[0]
            assert ids[0] == token
            assert (ids[1 + max(wanted, 0) :] == -1).all()
            assert np.isneginf(values[wanted + 1 :]).all()
            np.testing.assert_allclose(values[: wanted + 1], logs[ids[: wanted + 1]], atol=1e-5)
            if wanted == 2:
                assert ids[1:].tolist() == np.argsort(-logits, kind="stable")[:2].tolist()
            assert row.ranks[0] == 1
            known.append(token)


@pytest.mark.parametrize(
    ("params", "count", "reason"),
    [
        (lambda t: SamplingParams(max_tokens=8, eos_token_ids=(t[2],)), 3, FinishReason.STOP),
        (lambda t: SamplingParams(max_tokens=8, stop_sequences=(t[1:4],)), 4, FinishReason.STOP),
        (lambda t: SamplingParams(max_tokens=8, stop_sequences=((t[1], t[3]),)), 8, FinishReason.LENGTH),
    ],
)
def test_a_request_ends_where_it_should(opaque, oracle, params, count, reason):
    tokens = oracle.expected([1, 2, 3], 8)
    engine = make(opaque, oracle)
    engine.submit(Request("a", [1, 2, 3], params(tokens)))
    (finished,) = engine.run()
    assert finished.token_ids == tokens[:count]
    assert finished.reason is reason


def test_min_tokens_bad_words_and_penalties_change_what_is_sampled(opaque, oracle):
    (first,) = oracle.expected([1, 2, 3], 1)
    engine = make(opaque, oracle)
    engine.submit(Request("min", [1, 2, 3], SamplingParams(max_tokens=3, min_tokens=3, eos_token_ids=(first,))))
    engine.submit(Request("bad", [1, 2, 3], SamplingParams(max_tokens=1, bad_words=(first,))))
    engine.submit(Request("said", [1, 2, first], SamplingParams(max_tokens=4, repetition_penalty=9.0)))
    ended = {finished.request_id: finished.token_ids for finished in engine.run()}
    assert first not in ended["min"]
    assert len(ended["min"]) == 3
    assert ended["bad"][0] == (first + 1) % 97  # the second best
    assert len({1, 2, first, *ended["said"]}) == 7


def test_penalties_are_the_same_with_preemption(opaque, oracle):
    prompts = {f"r{n}": [n, 2 * n, 3] for n in range(3)}
    params = SamplingParams(max_tokens=14, frequency_penalty=1.5, presence_penalty=0.4, repetition_penalty=1.1)
    results = []
    for blocks in (24, 6):
        engine = make(opaque, oracle, blocks=blocks)
        for name, prompt in prompts.items():
            engine.submit(Request(name, prompt, params))
        results.append({finished.request_id: finished.token_ids for finished in engine.run()})
        assert (engine.scheduler.preemptions > 0) == (blocks == 6)
        assert engine.worker.runner.histories == {}
    assert results[0] == results[1]


def test_a_bad_batch_changes_nothing(opaque, oracle):
    """G8, seen from the worker: the step did not happen."""
    sink = MemorySink()
    worker = make(opaque, oracle, sink=sink).worker
    good, bad = (admit(Request(name, [1, 2], SamplingParams()), worker.layout) for name in ("good", "bad"))
    before = opaque.device.copy_out(worker.state.memory, [worker.layout.groups["step_input"]], worker.stream).data[0]
    tasks = [
        Task(TaskKind.PREFILL, 0, good, num_scheduled_tokens=2, blocks=[0]),
        Task(TaskKind.PREFILL_CHUNK, 1, bad, num_scheduled_tokens=1),
    ]
    with pytest.raises(InvalidBatch, match="the slot does not hold this request"):
        worker.step(tasks)
    after = opaque.device.copy_out(worker.state.memory, [worker.layout.groups["step_input"]], worker.stream).data[0]
    assert before.tobytes() == after.tobytes()
    assert sink.records == []
    assert oracle.rows == []
    assert worker.step(tasks[:1]).request_ids == ("good",)


class Refusing(MemorySink):
    """Keeps every record but raises at the second: full, and it is kept; or closed, and it is not."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def put(self, pending):
        second, keep = len(self.records) == 1, self.error is SinkFull
        if keep or not second or self.error is None:
            super().put(pending)
        if second and (error := self.error) is not None:
            self.error = None
            raise error("at the second", cure="read", hook="save_output", argument="sink")


@pytest.mark.parametrize("error", [SinkFull, SinkClosed])
def test_a_sink_that_raises_does_not_stop_the_engine(opaque, oracle, error):
    """The step counts, and the engine continues from it; a full sink keeps the record (G23), a closed one does not."""
    sink = Refusing(error)
    engine = make(opaque, oracle, sink=sink)
    engine.submit(Request("a", [1, 2], SamplingParams(max_tokens=4)))
    engine.submit(Request("short", [5], SamplingParams(max_tokens=2)))
    assert engine.step() == []
    with pytest.raises(error) as raised:
        engine.step()
    ended = {finished.request_id: finished.token_ids for finished in engine.run()}
    assert ended == {"a": oracle.expected([1, 2], 4), "short": oracle.expected([5], 2)}
    if error is SinkFull:
        assert delivered(sink) == ended
    else:
        lost = raised.value.ticket.record()
        assert sorted(lost.request_ids) == ["a", "short"]
        assert lost.positions.tolist() == [1, 1]


def test_a_step_without_tasks_does_not_count_where_an_earlier_error_is_raised(opaque, oracle, monkeypatch):
    """The error of the first step's output: no runner has been called, and the next step has its number (G14)."""
    engine = make(opaque, oracle)
    engine.submit(Request("a", [1, 2], SamplingParams(max_tokens=4)))
    engine.step()
    stepper, refused = engine.worker, [HalError("the record could not be queued")]
    order = stepper.device.order_after_reads

    def raises_once(**given):
        if refused:
            raise refused.pop()
        order(**given)

    monkeypatch.setattr(stepper.device, "order_after_reads", raises_once)
    steps, rows = stepper.steps, len(oracle.rows)
    with pytest.raises(HalError, match="could not be queued"):
        engine.step()
    assert (stepper.steps, len(oracle.rows)) == (steps, rows)
    assert {one.request_id: one.token_ids for one in engine.run()} == {"a": oracle.expected([1, 2], 4)}


def test_g14_an_unusable_state_is_refused_before_the_runner(opaque, oracle):
    engine = make(opaque, oracle)
    engine.submit(Request("a", [1, 2], SamplingParams(max_tokens=4)))
    engine.step()
    engine.worker.state.mark_unusable("the ranks differ")
    steps, rows = engine.worker.steps, len(oracle.rows)
    with pytest.raises(StateUnusable, match="the ranks differ"):
        engine.step()
    assert (engine.worker.steps, len(oracle.rows)) == (steps, rows)


@pytest.mark.parametrize("error", [SinkClosed("the disk is full"), Undelivered("the disk is full", [("a", 0, 1)])])
@pytest.mark.parametrize("method", ["launch", "propose"])
def test_a_sinks_late_error_is_not_the_runners(opaque, oracle, monkeypatch, error, method):
    """A hook that the runner calls raises the error of an earlier step's output."""
    engine = make(opaque, oracle, sizes=replace(SIZES, max_draft_tokens=2))
    engine.submit(Request("a", [1, 2], SamplingParams(max_tokens=4)))

    def raises(*_):
        raise error

    monkeypatch.setattr(engine.worker.runner, method, raises)
    with pytest.raises(type(error)) as raised:
        engine.step()
    assert raised.value is error
