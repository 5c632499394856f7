"""``insert_tasks_v1`` against the reference writer: every array, host list and attribute, on cpu and sim."""

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue, OutOfMemory
from hal_fastdeploy.batches import PROPOSER
from hal_fastdeploy.insertion import Insertion
from hal_fastdeploy.names import KNOWN, PROPOSED
from hal_fastdeploy.runners import GpuRunner, XpuRunner
from hal_fastdeploy.standins import VALUES, drawn, prefill

import hal
from tests import share

from . import upstream as up

PREFILL, DECODE, PREEMPTED, ABORT = up.PREFILL, up.DECODE, up.PREEMPTED, up.ABORT
METHODS, ROLES = ("", "naive", "ngram", "suffix", "mtp"), ("mixed", "prefill", "decode")
SEQUENCES = 2000
"""Drawn sequences in all, on both devices together; ``make test`` draws a share (tests/share.py)."""


@pytest.fixture(scope="module", params=["cpu", "sim"])
def bound(request):
    if request.param == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    with hal.open_device(request.param) as device:
        yield device


class Pair:
    """A runner with the drop-in over a device's memory, and one with the reference over arrays."""

    def __init__(self, bound, method="", role="mixed", cached=-1, kind="gpu", fresh=False, more=None, older=False):
        target, proposer = up.target_arrays(method, kind), up.proposer_arrays(method)
        if not fresh:
            target, proposer = up.used(target), up.used(proposer)
        self.tensors, self.own = up.OnDevice(bound, target), up.OnDevice(bound, proposer)
        options = {"method": method, "role": role, "cached": cached, "kind": kind}
        self.runner = up.runner_of(self.tensors.views, self.own.views, **options)
        self.reference = up.runner_of(target, proposer, **options)
        if older:  # the XPU's runner of release 2.6
            for one in (self.runner, self.reference):
                one.speculative_method = one.spec_method
                del one.spec_method
        self.method, self.kind, self.passed = method, kind, []
        chosen = XpuRunner if kind == "xpu" else GpuRunner
        self.more = up.MORE[kind] if more is None else more
        found = {} if more is None else {"found": found_with(chosen, more), "proposer_found": PROPOSED.served}
        self.acts = False
        self.insertion = Insertion(bound, self.runner, self.as_upstream, kind=chosen, **found)

    def as_upstream(self, requests, num_running):
        """Upstream's own function over the device's memory, in a drawn sequence."""
        self.passed.append((requests, num_running))
        if not self.acts:
            return
        batches = [(self.runner.share_inputs, self.tensors)]
        batches += [(self.runner.proposer.model_inputs, self.own)] if self.method == "mtp" else []
        arrays = [tensors.read() for _, tensors in batches]
        for (batch, _), values in zip(batches, arrays, strict=True):
            batch.data |= values
        (up.insert_xpu if self.kind == "xpu" else up.insert)(self.runner, requests, num_running, self.more)
        for (batch, tensors), values in zip(batches, arrays, strict=True):
            for name, view in tensors.views.items():
                batch.data[name] = view
                stream = tensors.bound.default_stream
                tensors.bound.async_set_value(target=view, value=values[name], stream=stream).wait()
            if "seq_lens_this_time_buffer" in batch:
                count = num_running if batch is self.runner.share_inputs else None
                batch.data["seq_lens_this_time"] = batch["seq_lens_this_time_buffer"][:count]

    def insert(self, requests, num_running=4):
        requests = up.BatchRequest(requests)
        ticket = self.insertion(requests, num_running)
        self.refer(requests, num_running)
        ticket.wait()

    def refer(self, requests, num_running=4):
        insert = up.insert_xpu if self.kind == "xpu" else up.insert
        insert(self.reference, up.BatchRequest(requests), num_running, self.more)

    def check(self):
        """Every array, host list, attribute and call is the reference's."""
        __tracebackhide__ = True
        mine, theirs = self.runner, self.reference
        self.compare(self.tensors, mine.share_inputs, theirs.share_inputs)
        if self.method == "mtp":
            self.compare(self.own, mine.proposer.model_inputs, theirs.proposer.model_inputs)
            assert mine.proposer.exist_prefill_flag == theirs.proposer.exist_prefill_flag, "exist_prefill_flag"
        own = {"share_inputs", "proposer", "sampler", "initialize_kv_cache", "calls", "deterministic_logger"}
        for name in (
            vars(theirs).keys() - own - {name for name in vars(theirs) if name.endswith(("_config", "_controller"))}
        ):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert vars(mine).keys() == vars(theirs).keys()
        for name in ("suffix", "sampler", "swap", "log"):  # each object's calls are in order
            made = [[call for call in one.calls if call[0] == name] for one in (mine, theirs)]
            assert made[0] == made[1], f"calls of {name}"

    def compare(self, tensors, mine, theirs):
        __tracebackhide__ = True
        got = tensors.read()
        for name, array in got.items():
            should = theirs[name]
            assert (array.dtype, array.shape) == (should.dtype, should.shape), name
            np.testing.assert_array_equal(array, should, err_msg=name)
        assert mine.data.keys() == theirs.data.keys()
        for name in mine.data.keys() - got.keys() - {"seq_lens_this_time"}:
            should = theirs[name]
            same = np.array_equal(mine[name], should) if isinstance(should, np.ndarray) else mine[name] == should
            assert same, f"{name} is {mine[name]}, but should be {should}"
        if "seq_lens_this_time_buffer" in theirs:
            view, buffer = mine["seq_lens_this_time"], mine["seq_lens_this_time_buffer"]
            assert view.shape == theirs["seq_lens_this_time"].shape, "seq_lens_this_time"
            assert (view.memory, view.offset) == (buffer.memory, buffer.offset), "seq_lens_this_time is no view"
        assert mine.index_to_batch_id == theirs.index_to_batch_id


def found_with(kind, more):
    """The names of a function that does what each version does, and ``more`` of what only some do."""
    left = set.union(*up.MORE.values()) - more
    if "share_inputs.enable_thinking" in left and kind is XpuRunner:
        left.add("share_inputs.max_reply_lens")
    if kind is GpuRunner:
        left -= up.MORE["xpu"]
    return KNOWN[kind].served - left


def exchange(pair, first, second):
    """Exchange the data of two slots on both sides; the lists of names and arguments stay, as upstream's do."""
    found, bound = pair.tensors.read(), pair.tensors.bound
    for name, view in pair.tensors.views.items():
        if name != "eos_token_id":
            array = found[name]
            array[[first, second]] = array[[second, first]]
            bound.async_set_value(target=view, value=array, stream=bound.default_stream).wait()
            pair.reference.share_inputs[name][[first, second]] = pair.reference.share_inputs[name][[second, first]]
    for one in (pair.runner, pair.reference):
        for name in ("top_k_list", "min_p_list", "top_p_list"):
            held = one.share_inputs[name]
            held[first], held[second] = held[second], held[first]


def reorder(pair, first, second):
    """Exchange two slots, as a reordering of prefills and decodes does."""
    exchange(pair, first, second)
    for one in (pair.runner, pair.reference):
        slots = one.share_inputs.index_to_batch_id
        for slot in (first, second):
            slots.setdefault(slot, slot)
        slots[first], slots[second] = slots[second], slots[first]


def condense(pair):
    """Move the running requests to the front, and forget the others: each side by the host data that it was left."""
    moves = []
    for one in (pair.runner, pair.reference):
        inputs, slots = one.share_inputs, one.share_inputs.index_to_batch_id
        running = sorted(slot for slot, batch_id in slots.items() if batch_id in inputs["running_requests_ids"])
        if inputs["num_running_requests"] == len(slots):
            running = []
        moves.append([(to, slot) for to, slot in enumerate(running) if to != slot])
        if running:
            kept = [slots[slot] for slot in running]
            slots.clear()
            slots.update(enumerate(kept))
    assert moves[0] == moves[1], "running_requests_ids"
    for to, slot in moves[0]:
        exchange(pair, to, slot)


RUNNERS = [("gpu", method) for method in METHODS] + [("xpu", method) for method in ("", "mtp")]


def drawn_pair(bound, draw, kind, method, role):
    """Runners of a drawn version, with and without what a configuration adds."""
    more = {name for name in sorted(up.MORE[kind]) if draw.random() < 0.5}
    swaps, logs, hybrid, older = [draw.random() < 0.5 for _ in range(4)]
    older = older and kind == "xpu"
    pair = Pair(bound, method, role, cached=draw.choice([-1, 8]), kind=kind, more=more, older=older)
    for one in (pair.runner, pair.reference):
        one.enable_cache_manager_v1, one.proposer.hybrid_mode = swaps, hybrid
        if logs:
            log = lambda *given, calls=one.calls: calls.append(("log", *given))  # noqa: E731
            one.deterministic_logger = SimpleNamespace(log_prefill_input=log)
    return pair


def sequence(pair, draw, role, reorders):
    """Some calls with drawn requests; between two of them slots are reordered."""
    names, pair.acts = {}, True
    if reorders and draw.random() < 0.3:
        for one in (pair.runner, pair.reference):
            one.share_inputs.index_to_batch_id = {0: 2, 2: 0}
    for turn in range(draw.randrange(1, 5)):
        if reorders and draw.random() < 0.3:
            reorder(pair, *draw.sample(range(4), 2))
        if reorders and turn and draw.random() < 0.5:
            condense(pair)
        slots = [draw.randrange(4) for _ in range(draw.randrange(1, 6))]  # a slot may come twice
        pair.insert([drawn(draw, slot, role, names) for slot in slots], draw.randrange(1, 5))
        pair.check()
    assert (reorders and pair.method == "mtp") or not pair.passed, "served"


@pytest.mark.drawn
@pytest.mark.parametrize(("kind", "method"), RUNNERS)
@pytest.mark.parametrize("role", ROLES)
def test_drawn_sequences_leave_what_the_reference_leaves(bound, kind, method, role):
    draw = random.Random(f"{kind} {method} {role} 29")
    for turn in range(share.of(SEQUENCES // (2 * len(RUNNERS) * len(ROLES)) + 1)):
        sequence(drawn_pair(bound, draw, kind, method, role), draw, role, reorders=kind == "gpu" and turn % 2 == 0)


CASES = {
    "prompt 6": ("mixed", "", prefill(1, range(6)), (6, 0, 6, 6, 0), False),
    "first chunk": ("mixed", "", prefill(1, range(10), piece=(0, 4)), (10, 0, 4, 4, 0), True),
    "last chunk": ("mixed", "", prefill(1, range(10), piece=(4, 10)), (10, 0, 6, 6, 4), False),
    "resumed": ("mixed", "", prefill(1, range(6), [8, 9]), (8, 2, 8, 8, 0), False),
    "decode role": ("decode", "", prefill(1, range(6), [9], (6, 7)), (7, 1, 1, 0, 6), False),
    "decode role with drafts": ("decode", "mtp", prefill(1, range(6), [9], (6, 7)), (7, 1, 2, 0, 6), False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_arrays_that_were_seen_of_upstreams_own_function(bound, case):
    """The facts' table of arrays that were executed, not the reference's reading of them."""
    role, method, request, should, chunk = CASES[case]
    pair = Pair(bound, method, role, cached=8, fresh=True)
    pair.insertion([request], 2).wait()
    got = pair.tensors.read()
    names = ("prompt_lens", "step_idx", "seq_lens_this_time_buffer", "seq_lens_encoder", "seq_lens_decoder")
    assert tuple(int(got[name].reshape(-1)[1]) for name in names) == should
    assert bool(pair.runner.share_inputs["is_chunk_step"][1]) is chunk
    if method:
        assert got["draft_tokens"][1].tolist() == [30, 31, 0, 0]
        assert (pair.runner._cached_launch_token_num, pair.runner._cached_real_bsz) == (12, 3)
        own = pair.own.read()
        assert (int(own["seq_lens_this_time_buffer"][1]), own["mask_rollback"][1, 0]) == (2, 1)
        assert pair.runner.proposer.model_inputs["input_ids_len"][1, 0] == 0


def broken(**changes):
    """A request that cannot be inserted."""
    values = {name: changes.pop(name) for name in [*changes] if name in VALUES or name == "stop_seqs_len"}
    request = prefill(1, range(6), **values)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idx": 4}, "slot 4 of 4"),
        ({"prefill_end_index": 7}, "prefill_start_index and prefill_end_index are 0 and 7, of 6 tokens"),
        ({"block_tables": [1] * 7}, "7 blocks, the table holds 6"),
        ({"eos_token_ids": [1]}, "1 eos_token_ids, the runner holds 2"),
        ({"temperature": None}, "temperature: None .NoneType. is no int, float or bool"),
        ({"top_k": (1,)}, "top_k: "),
        ({"stop_token_ids": [[1]] * 4, "stop_seqs_len": [1] * 4}, "do not fit 3 sequences of 4"),
        ({"stop_token_ids": [[1]], "stop_seqs_len": [1, 0, 0]}, "3 lengths for 1 sequences: padded already"),
        ({"seed": 2**63}, f"seed: {2**63} does not fit int64"),
        ({"top_k": float("nan")}, "top_k: nan does not fit int64"),
        ({"block_tables": None}, "block_tables: NoneType is no list"),
        ({"prompt_token_ids": None}, "prompt_token_ids: NoneType is no list"),
        ({"stop_token_ids": [1], "stop_seqs_len": [1]}, "stop_token_ids: a sequence: int is no list"),
        ({"stop_token_ids": [[1]], "stop_seqs_len": 1}, "stop_seqs_len: int is no list"),
        ({"block_tables": np.array([2**40])}, "block_tables: an element is no whole number of int32"),
        ({"prompt_token_ids": np.arange(12).reshape(6, 2)}, "prompt_token_ids: an element is no whole number"),
        ({"block_tables": [2**40]}, "block_tables: an element is no whole number of int32"),
        ({"prompt_token_ids": [1, 2, 3.5, 4, 5, 6]}, "prompt_token_ids: an element is no whole number of int64"),
        ({"draft_token_ids": [3, "x"]}, "draft_token_ids: an element is no whole number of int64"),
        ({"bad_words_token_ids": [1.5]}, "bad_words_token_ids: an element is no whole number"),
        ({"stop_token_ids": [[2**70]], "stop_seqs_len": [1]}, "stop_token_ids: an element is no whole number"),
        ({"enable_thinking": True, "reasoning_max_tokens": "x"}, "reasoning_max_tokens: 'x' .str. is no int"),
        ({"enable_thinking": True, "response_max_tokens": 2**40}, f"response_max_tokens: {2**40} does not fit int32"),
        ({"draft_token_ids": [3]}, "needs the first token and one draft"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_g08_a_wrong_request_is_named_and_nothing_changes(bound, change, message):
    pair = Pair(bound, "mtp", "decode")
    pair.runner.share_inputs.index_to_batch_id = {0: 0, 2: 12}
    before, own = pair.tensors.read(), pair.own.read()
    with pytest.raises(InvalidBatch, match=message) as raised:
        pair.insertion([prefill(0, range(4), [9], (4, 5)), broken(**change)], 2)
    assert "'r1'" in str(raised.value)
    for after, had in ((pair.tensors.read(), before), (pair.own.read(), own)):
        for name, array in after.items():
            np.testing.assert_array_equal(array, had[name], err_msg=name)
    assert (pair.runner.calls, pair.runner.share_inputs["req_ids"]) == ([], [None] * 4)
    assert pair.runner.share_inputs.index_to_batch_id == {0: 0, 2: 12}


def test_g08_every_wrong_request_of_a_call_is_named(bound):
    pair = Pair(bound)
    wrong = [broken(idx=9), prefill(0, range(3)), broken(temperature="x", request_id="b"), object()]
    with pytest.raises(InvalidBatch) as raised:
        pair.insertion(wrong, 4)
    first, second, third = raised.value.problems
    assert first == "task 0 ('r1'): slot 9 of 4"
    assert second == "task 2 ('b'): temperature: 'x' (str) is no int, float or bool"
    assert third.startswith("task 3 ('?'): ")
    assert (pair.runner.calls, pair.runner.share_inputs.index_to_batch_id) == ([], {})


@pytest.mark.parametrize("kind", ["gpu", "xpu"])
@pytest.mark.parametrize("task", [DECODE, PREEMPTED, ABORT])
def test_g08_a_slot_of_another_request_is_named(bound, kind, task):
    pair = Pair(bound, kind=kind)
    pair.insert([prefill(1, range(3), name="a")])
    before = pair.tensors.read()
    with pytest.raises(InvalidBatch, match=r"task 0 \('b'\): the slot of batch id 1 holds 'a'"):
        pair.insertion([up.Request(task, 1, "b", block_tables=[5])], 4)
    for name, array in pair.tensors.read().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    pair.insert([prefill(1, range(3), name="b"), up.Request(task, 1, "b", block_tables=[5])])
    pair.check()


def test_g08_a_write_that_fails_leaves_host_lists_and_slots(bound, monkeypatch):
    pair = Pair(bound)

    def full(**given):
        raise OutOfMemory("the staging ring is full")

    monkeypatch.setattr(pair.insertion.device, "write", full)
    with pytest.raises(OutOfMemory):
        pair.insertion([prefill(1, range(3))], 4)
    monkeypatch.undo()
    assert (pair.runner.calls, pair.runner.share_inputs.index_to_batch_id) == ([], {})
    pair.insert([prefill(1, range(4), name="b")])
    pair.check()


def test_one_call_is_one_submission_with_128_prefills_of_two_models(bound, monkeypatch):
    monkeypatch.setitem(up.SIZES, "n", 128)
    pair = Pair(bound, "mtp")
    before = bound.counters()
    ticket = pair.insertion([prefill(slot, range(10)) for slot in range(128)], 128)
    assert (bound.counters() - before).submissions <= 2
    ticket.wait()
    up.insert(pair.reference, [prefill(slot, range(10)) for slot in range(128)], 128)
    np.testing.assert_array_equal(pair.tensors.read()["token_ids_all"], pair.reference.share_inputs["token_ids_all"])


def test_elsewhere_a_call_is_a_submission_a_tensor_and_the_log_says_it(bound, monkeypatch, caplog):
    """Kernels there take no addresses. The capability is false, and ``hal devices --open`` shows it."""
    alone = replace(bound.device.capabilities, several_memories=False)
    monkeypatch.setattr(bound.device, "capabilities", alone)
    write = bound.device.submit_all
    monkeypatch.setattr(bound.device, "submit_all", lambda plans, stream: [write([one], stream) for one in plans][-1])
    with caplog.at_level("WARNING", "hal"):
        pair = Pair(bound, "mtp")
    tensors = len(pair.tensors.views) + len(pair.own.views)
    assert f"has no several_memories: an insertion is a submission for each of {tensors} tensors" in caplog.text
    before = bound.counters()
    pair.insert([prefill(slot, range(10), stop_token_ids=[[1]], stop_seqs_len=[1], seed=1) for slot in range(4)])
    assert len(PROPOSER) < (bound.counters() - before).submissions <= 2 * tensors
    pair.check()


def test_a_held_stream_does_not_delay_an_insertion(bound):
    """Pull request 7323: insertions of the decode role must not wait for the in-flight step."""
    if not bound.capabilities.can_hold_stream:
        pytest.skip("the device's calls are done when they return")
    pair, requests = Pair(bound, "mtp", "decode", cached=8), [prefill(slot, range(6), [9], (6, 7)) for slot in range(4)]
    with bound.device.hold_stream(bound.default_stream):
        before = bound.counters()
        ticket = pair.insertion(requests, 4)
        cost = bound.counters() - before
        assert not ticket.done()
    assert (cost.submissions <= 2, cost.host_waits) == (True, 0)
    ticket.wait()
    up.insert(pair.reference, requests, 4)
    pair.check()


@pytest.mark.parametrize("error", [None, RuntimeError("half way")])
def test_after_upstreams_own_call_no_row_is_taken_for_known(bound, error):
    pair = Pair(bound)

    def upstream(requests, num_running):
        if error is not None:
            raise error

    pair.insertion.upstream = upstream
    pair.insert([prefill(1, range(3))])
    view = pair.tensors.views["bad_tokens"]
    bound.async_set_value(target=view, value=5, stream=bound.default_stream).wait()  # as upstream's might
    pair.reference.share_inputs["bad_tokens"][...] = 5
    with nullcontext() if error is None else pytest.raises(RuntimeError, match="half way"):
        pair.insertion([up.Request(up.EXTEND, 1, "r1")], 4)
    pair.insert([prefill(1, range(3))])
    np.testing.assert_array_equal(pair.tensors.read()["bad_tokens"], pair.reference.share_inputs["bad_tokens"])


def test_after_a_write_that_fails_half_way_no_row_is_taken_for_known(bound, monkeypatch):
    """A device without several_memories has a submission for each tensor."""
    pair = Pair(bound)
    pair.insert([prefill(1, range(3))])

    def half_way(*, writes, stream):
        plans = [plan for plan in writes.plans() if plan.memory is pair.tensors.views["bad_tokens"].memory]
        bound.device.submit_all(plans, stream).wait()
        raise OutOfMemory("the ring stayed full", cure="wait")

    with monkeypatch.context() as patch:
        patch.setattr(type(bound), "write", lambda self, **given: half_way(**given))
        with pytest.raises(OutOfMemory, match="the ring stayed full"):
            pair.insertion([prefill(1, range(3), bad_words_token_ids=[1, 2, 3])], 4)
    pair.insert([prefill(1, range(3))])
    assert (pair.tensors.read()["bad_tokens"][1] == -1).all()


@pytest.mark.parametrize("attribute", ["guided_json", "structural_tag", "pooling_params"])
def test_what_is_not_served_goes_to_upstreams_own_function(bound, attribute, caplog):
    pair, request = Pair(bound), prefill(1, range(3))
    setattr(request, attribute, "x")
    with caplog.at_level("INFO", "hal"):
        pair.insertion([request], 2)
    assert pair.passed == [([request], 2)]
    assert attribute in caplog.text
    pair.insertion([up.Request(up.EXTEND, 1, "r1")], 2)
    pair.insertion([up.Request(7, 1, "r1")], 2)
    assert len(pair.passed) == 3


@pytest.mark.parametrize("method", ["", "mtp"])
def test_a_batch_id_that_loses_its_slot_within_a_call(bound, method):
    """The proposer looks it up again when the runner is done, so with MTP the call is upstream's."""
    pair = Pair(bound, method)
    pair.acts = True
    for one in (pair.runner, pair.reference):
        one.share_inputs.index_to_batch_id = {0: 3}
    pair.insert([up.Request(DECODE, 3, "a", block_tables=[5]), prefill(0, range(4))])
    pair.check()
    assert (len(pair.passed), pair.runner.share_inputs.index_to_batch_id) == (bool(method), {0: 0})


def test_a_proposer_with_attention_masks_goes_to_upstreams_own_function(bound):
    pair = Pair(bound, "mtp")
    pair.runner.proposer.use_attn_mask_offset = True
    pair.insertion([prefill(1, range(3))], 2)
    assert len(pair.passed) == 1
    assert pair.runner.share_inputs.index_to_batch_id == {}


def replace_tensors(pair, batch, tensors, names):
    """Put other tensors of the same values in the place of some, as waking up and updates of weights do."""
    values = {name: array.copy() for name, array in tensors.read().items() if name in names}
    other = up.OnDevice(tensors.bound, values)
    for name, view in other.views.items():
        batch[name] = tensors.views[name] = view


@pytest.mark.parametrize("kind", ["gpu", "xpu"])
def test_tensors_that_waking_up_replaced_are_resolved_again(bound, kind, caplog):
    pair = Pair(bound, "mtp", kind=kind)
    pair.insert([prefill(1, range(6))])  # its row of bad words is known to be -1
    old = pair.tensors.views["bad_tokens"]
    replace_tensors(pair, pair.runner.share_inputs, pair.tensors, ("bad_tokens", "step_idx", "infer_seed"))
    replace_tensors(pair, pair.runner.proposer.model_inputs, pair.own, up.proposer_arrays("mtp"))
    bound.async_set_value(target=pair.tensors.views["bad_tokens"], value=5, stream=bound.default_stream).wait()
    pair.reference.share_inputs["bad_tokens"][...] = 5
    before = up.OnDevice.read(SimpleNamespace(bound=bound, views={"bad_tokens": old}))
    with caplog.at_level("INFO", "hal"):
        pair.insert([prefill(1, range(5)), prefill(2, range(4))])
    assert "follows tensors that were replaced: " in caplog.text
    pair.check()
    after = up.OnDevice.read(SimpleNamespace(bound=bound, views={"bad_tokens": old}))
    np.testing.assert_array_equal(before["bad_tokens"], after["bad_tokens"])


def test_after_a_refused_tensor_of_the_proposer_no_row_is_taken_for_known(bound):
    pair = Pair(bound, "mtp")
    pair.insert([prefill(1, range(6))])  # its row of bad words is known to be -1
    own = pair.runner.proposer.model_inputs
    replace_tensors(pair, pair.runner.share_inputs, pair.tensors, ("bad_tokens",))
    bound.async_set_value(target=pair.tensors.views["bad_tokens"], value=5, stream=bound.default_stream).wait()
    pair.reference.share_inputs["bad_tokens"][...] = 5
    right, own["step_idx"] = own["step_idx"], up.OnDevice(bound, up.arrays("step_idx i32 n,1 0")).views["step_idx"]
    with pytest.raises(InvalidValue, match=r"model_inputs\['step_idx'\] is int32"):
        pair.insertion([prefill(1, range(5))], 4)
    own["step_idx"] = right
    pair.insert([prefill(1, range(5))])
    pair.check()


def test_a_proposer_with_other_inputs_is_followed(bound):
    """An update of weights makes the proposer's inputs anew, as one object."""
    pair = Pair(bound, "mtp")
    pair.insert([prefill(1, range(6))])
    pair.own = up.OnDevice(bound, pair.own.read())
    made = up.runner_of({}, pair.own.views, method="mtp").proposer
    made.model_inputs.data["caches"], made.model_inputs.index_to_batch_id = [], {1: 1}
    made.model_inputs["input_ids_len"][1] = 5
    pair.runner.proposer = made
    pair.insert([prefill(2, range(4))])
    pair.check()


def test_g26_a_tensor_of_another_type_in_the_place_of_one_is_named(bound):
    pair = Pair(bound)
    pair.runner.share_inputs["step_idx"] = up.OnDevice(bound, up.arrays("step_idx i32 n,1 0")).views["step_idx"]
    with pytest.raises(InvalidValue, match=r"share_inputs\['step_idx'\] is int32 \[4, 1\], not int64 \[n, 1\]"):
        pair.insertion([prefill(1, range(3))], 2)
    assert (pair.runner.calls, pair.runner.share_inputs.index_to_batch_id) == ([], {})


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("step_idx", "step_idx i32 n,1 0", r"is int32 \[4, 1\], not int64 \[n, 1\]"),
        ("step_idx", "step_idx i64 n,Q 0", r"is int64 \[4, 3\], not int64 \[n, 1\]"),
        ("bad_tokens", "bad_tokens i64 n 0", r"is int64 \[4\], not int64 \[n, V\]"),
        ("prompt_lens", "prompt_lens i64 L,1 0", r"is int64 \[24, 1\], not int64 \[n, 1\]"),
        ("bad_tokens", "", "share_inputs has no 'bad_tokens'"),
    ],
)
def test_g26_a_tensor_of_another_kind_is_named_at_mounting(bound, name, table, message):
    arrays = up.target_arrays()
    del arrays[name]
    tensors = up.OnDevice(bound, arrays | up.arrays(table)).views
    with pytest.raises(InvalidValue, match=message):
        Insertion(bound, up.runner_of(tensors), lambda *given: None)


def test_a_tensor_without_its_last_dimension_of_one_has_the_same_rows(bound):
    """The XPU's runner of release 2.6 has lengths of ``[n, 1]``."""
    arrays = up.target_arrays(kind="xpu")
    for name in ("seq_lens_encoder", "seq_lens_decoder"):
        arrays[name] = arrays[name].reshape(-1, 1)
    arrays["step_idx"] = arrays["step_idx"].reshape(-1)
    placed = up.OnDevice(bound, arrays)
    runner, reference = up.runner_of(placed.views, kind="xpu"), up.runner_of(arrays, kind="xpu")
    requests = [prefill(1, range(6), [8], (2, 7)), prefill(3, range(4))]
    Insertion(bound, runner, print, kind=XpuRunner)(requests, 4).wait()
    up.insert_xpu(reference, requests, 4)
    for name, array in placed.read().items():
        np.testing.assert_array_equal(array, reference.share_inputs[name], err_msg=name)


def test_g26_a_tensor_of_another_place_is_named_at_mounting(bound):
    """Host memory for a device that has its own, memory of another device for the cpu."""
    tensors = up.OnDevice(bound, up.target_arrays()).views
    with hal.open_device("cpu") as other:
        tensors["step_idx"] = up.OnDevice(other, up.arrays("step_idx i64 n,1 0")).views["step_idx"]
        with pytest.raises(InvalidValue, match=r"step_idx: share_inputs\['step_idx'\].* (device|memory)"):
            Insertion(bound, up.runner_of(tensors), lambda *given: None)


def test_prompts_and_outputs_may_be_arrays(bound):
    pair = Pair(bound)
    request = prefill(1, range(6), [8, 9])
    request.prompt_token_ids, request.output_token_ids = np.arange(6), np.array([8, 9], np.int32)
    pair.insertion([request], 4).wait()
    pair.refer([prefill(1, range(6), [8, 9])])
    pair.compare(pair.tensors, pair.runner.share_inputs, pair.reference.share_inputs)


def test_paddles_own_tensors_are_written_where_they_are():
    paddle = pytest.importorskip("paddle")
    with hal.open_device("cpu") as device:
        arrays = up.target_arrays()
        tensors = {name: paddle.to_tensor(array, place=paddle.CPUPlace()) for name, array in arrays.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        runner, reference = up.runner_of(tensors), up.runner_of(arrays)
        requests = [prefill(1, range(6), temperature=0.5), prefill(3, range(4), seed=2**53 + 1)]
        Insertion(device, runner, lambda *given: None)(requests, 4).wait()
        up.insert(reference, requests, 4)
        for name, tensor in tensors.items():
            assert tensor.data_ptr() == addresses[name]
            np.testing.assert_array_equal(tensor.numpy(), reference.share_inputs[name], err_msg=name)


def test_a_tensor_that_got_other_memory_is_resolved_again():
    """As sharing data does."""
    paddle = pytest.importorskip("paddle")
    with hal.open_device("cpu") as device:
        tensors = {name: paddle.to_tensor(array) for name, array in up.target_arrays().items()}
        insertion = Insertion(device, up.runner_of(tensors), lambda *given: None)
        insertion([prefill(1, range(6))], 4).wait()
        kept = tensors["prompt_lens"].get_tensor()
        other = paddle.zeros_like(tensors["prompt_lens"])
        tensors["prompt_lens"].get_tensor()._share_data_with(other.get_tensor())
        insertion([prefill(2, range(5))], 4).wait()
        assert kept is not None
        assert other.numpy().tolist() == [[0], [0], [5], [0]]


def test_g26_a_tensor_that_was_reshaped_since_mounting_is_named():
    """In place, over the same memory: its rows are no slots then."""
    paddle = pytest.importorskip("paddle")
    with hal.open_device("cpu") as device:
        tensors = {name: paddle.to_tensor(array) for name, array in up.target_arrays().items()}
        insertion = Insertion(device, up.runner_of(tensors), lambda *given: None)
        address, before = tensors["block_tables"].data_ptr(), tensors["block_tables"].numpy()
        tensors["block_tables"].reshape_([before.shape[1], before.shape[0]])
        assert tensors["block_tables"].data_ptr() == address
        reshaped = r"share_inputs\['block_tables'\] is int32 \[6, 4\], not int32 \[n, B\]"
        with pytest.raises(InvalidValue, match=reshaped):
            insertion([prefill(1, range(6))], 4)
        assert tensors["block_tables"].numpy().tolist() == before.reshape(before.shape[::-1]).tolist()


@pytest.mark.parametrize(("blocked", "restarted"), [([1], True), ([], False), ([2], False)])
def test_xpu_restarts_the_loop_for_a_blocked_slot(bound, blocked, restarted):
    """A DECODE task for a slot that a kernel has blocked sets ``not_need_stop``; after leaving it is not blocked."""
    pair = Pair(bound, kind="xpu")
    value = np.isin(np.arange(4), blocked)
    bound.async_set_value(target=pair.tensors.views["is_block_step"], value=value, stream=bound.default_stream).wait()
    pair.reference.share_inputs["is_block_step"][:] = value
    pair.reference.share_inputs["not_need_stop"][0] = pair.runner.share_inputs["not_need_stop"][0] = False
    pair.insert(
        [up.Request(ABORT, 2, "r2"), *(up.Request(DECODE, slot, f"r{slot}", block_tables=[5]) for slot in (2, 1))]
    )
    pair.check()
    assert bool(pair.runner.share_inputs["not_need_stop"][0]) is restarted


def test_xpu_reads_the_device_only_if_it_matters(bound):
    pair, more = Pair(bound, kind="xpu"), [up.Request(DECODE, 1, "r", block_tables=[5])]
    pair.insertion([prefill(0, range(3)), *more], 4).wait()
    before = bound.counters()
    pair.insertion(more, 4).wait()
    assert (bound.counters() - before).copies_out == 0
    pair.runner.share_inputs["not_need_stop"][0] = False
    before = bound.counters()
    pair.insertion(more, 4).wait()
    assert (bound.counters() - before).copies_out == 1
