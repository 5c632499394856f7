"""Drafts change no output: with any proposer, each request gets the tokens, log-probabilities and end of plain
decoding.
"""

from dataclasses import replace

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason
from hal_paddle_runner.runner import ModelRunner
from hal_paddle_runner.worker import Worker
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests import share

from .conftest import VOCAB, PagedOracle
from .drafters import Drafter, Setting, delivered, guesses, run

KINDS = ("none", "naive", "oracle", "always wrong", "partly right", "random")


@pytest.fixture(scope="module")
def cpu():
    with bind(CpuPlugin.open(0, {})) as device:
        yield device


few = st.integers(0, VOCAB - 1)
params_ = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "min_tokens": st.sampled_from([0, 0, 1, 5]),
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 3, 1]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "seed": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -0.5, 2.0]),
        "bad_words": st.lists(few, max_size=3).map(tuple),
        "eos_token_ids": st.lists(few, max_size=6, unique=True).map(tuple),
        "stop_sequences": st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
).map(lambda p: SamplingParams(**p | {"min_tokens": min(p["min_tokens"], p["max_tokens"])}))


def sequences_of(tokens, draw):
    """A stop sequence and an end token taken from a request's expected tokens, so that it does end with them."""
    if len(tokens) < 3:
        return {}
    at = draw(st.integers(0, len(tokens) - 2), label="stop at")
    if draw(st.booleans(), label="stop sequence"):
        return {"stop_sequences": (tuple(tokens[at : at + draw(st.integers(1, 2))]),)}
    return {"eos_token_ids": (tokens[at],)}


def plain(device, requests, spread=VOCAB):
    """The records of each request under plain decoding, one after the next."""
    return delivered(run(device, PagedOracle(spread), requests, Setting(slots=1)).worker.sink)


def every(name, prompt, **params):
    return Request(name, prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 14} | params))


EVERY = [
    every("drawn", [1, 2], temperature=1.0, seed=3, logprobs=2),
    every("drawn from few", [5], seed=4, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
    every("repetition", [2, 3], repetition_penalty=1.3),
    every("frequency", [4, 9], frequency_penalty=1.1),
    every("presence", [9], presence_penalty=1.5, logprobs=0),
    every("bad words", [8, 8], bad_words=(1, 3)),
    every("least", [7], min_tokens=7, eos_token_ids=(0, 1, 2, 3, 4, 5)),
    every("stops", [6], stop_sequences=((2, 3), (0, 1, 0), (5,))),
]
"""Each of the controls, by name; with a model of few different tokens, so that each has an effect."""


@pytest.mark.parametrize("kind", ["oracle", "partly right"])
@pytest.mark.parametrize(("blocks", "chunk"), [(64, 256), (8, 1)], ids=["ample", "scarce, in pieces"])
def test_every_control_holds_inside_a_run_of_drafts(cpu, kind, blocks, chunk):
    reference = plain(cpu, EVERY, spread=4)
    expected = {name: tuple(entry.tokens) for name, entry in reference.items()}
    free = [structs.replace(request, params=SamplingParams(temperature=0.0, max_tokens=14)) for request in EVERY]
    for name, entry in plain(cpu, free, spread=4).items():
        assert tuple(entry.tokens) != expected[name], f"the control {name!r} does nothing"
    drafter = Drafter(guesses(expected, kind, VOCAB), expected)
    setting = Setting(slots=5, blocks=blocks, chunk=chunk, drafts=5)
    engine = run(cpu, PagedOracle(4), EVERY, setting, drafter)
    assert (engine.scheduler.preemptions > 0) == (blocks == 8)
    found = delivered(engine.worker.sink)
    for name, entry in reference.items():
        assert (found[name].tokens, found[name].finish) == (entry.tokens, entry.finish), name
        assert len(found[name].logprobs) == len(entry.logprobs)
        for one, other in zip(found[name].logprobs, entry.logprobs, strict=True):
            assert (one[0], one[2]) == (other[0], other[2])
            np.testing.assert_allclose(one[1], other[1], atol=1e-6)


@settings(max_examples=share.of(80), deadline=None)
@given(data=st.data())
def test_no_proposer_changes_a_token_an_end_or_a_log_probability(cpu, data):
    """All controls on; chunked prefill beside it, scarce blocks with preemption, aborts at any step."""
    prompts = data.draw(st.lists(st.lists(few, min_size=1, max_size=12), min_size=1, max_size=5), label="prompts")
    requests = [Request(f"r{n}", prompt, data.draw(params_)) for n, prompt in enumerate(prompts)]
    spread = data.draw(st.sampled_from([4, VOCAB]), label="tokens that the model says")
    reference = plain(cpu, requests, spread)
    for number, request in enumerate(requests):  # some end in the middle
        ends = sequences_of(reference[request.request_id].tokens, data.draw)
        requests[number] = structs.replace(request, params=replace(request.params, **ends))
    reference = plain(cpu, requests, spread)
    expected = {name: tuple(entry.tokens) for name, entry in reference.items()}
    kind = data.draw(st.sampled_from(KINDS), label="proposer")
    setting = Setting(
        slots=data.draw(st.integers(1, 4), label="slots"),
        blocks=data.draw(st.integers(7, 24), label="blocks"),
        chunk=data.draw(st.sampled_from([1, 3, 256]), label="chunk"),
        drafts=0 if kind == "none" else data.draw(st.integers(1, 5), label="drafts"),
    )
    drafter = None if kind in ("none", "naive") else Drafter(guesses(expected, kind, VOCAB), expected)
    arrivals = [data.draw(st.integers(0, 4)) for _ in requests]
    aborts = data.draw(
        st.lists(st.tuples(st.integers(1, 12), st.sampled_from([r.request_id for r in requests])), max_size=2)
    )
    engine = run(cpu, PagedOracle(spread), requests, setting, drafter, arrivals=arrivals, aborts=aborts)
    found = delivered(engine.worker.sink)
    for name, entry in reference.items():
        got = found.get(name)
        if got is None or got.finish is FinishReason.ABORT:
            assert name in {aborted for _, aborted in aborts}
            if got is None:
                continue
        else:
            assert (got.finish, len(got.tokens)) == (entry.finish, len(entry.tokens))
        assert got.tokens == entry.tokens[: len(got.tokens)]
        assert len(got.logprobs) == len(got.tokens) * (bool(got.tokens) and bool(entry.logprobs))
        for (ids, values, rank), (ids_, values_, rank_) in zip(got.logprobs, entry.logprobs, strict=False):
            assert (ids, rank) == (ids_, rank_)
            np.testing.assert_allclose(values, values_, atol=1e-6)
    acceptance = engine.worker.acceptance
    assert acceptance.accepted <= acceptance.drafted
    if drafter is not None:
        assert drafter.known == {}
        assert drafter.fed == acceptance.drafted
        assert drafter.drafted >= acceptance.drafted  # preempted and aborted requests take theirs along


@pytest.fixture
def three():
    return [Request(f"r{n}", [n, 5, n + 7], SamplingParams(max_tokens=13)) for n in range(3)]


def test_right_drafts_are_taken_all_at_once(cpu, three):
    expected = {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()}
    drafter = Drafter(guesses(expected, "oracle", VOCAB), expected)
    engine = run(cpu, PagedOracle(), three, Setting(drafts=3), drafter)
    # The first token comes with the prompt, the twelve later ones by four.
    assert (engine.steps, engine.worker.acceptance.tokens_a_turn) == (4, 4.0)
    assert (engine.worker.acceptance.drafted, engine.worker.acceptance.accepted) == (27, 27)
    assert drafter.fed == 27
    assert drafter.finished == 3


def test_wrong_drafts_cost_steps_nothing(cpu, three):
    expected = {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()}
    engine = run(
        cpu, PagedOracle(), three, Setting(drafts=3), Drafter(guesses(expected, "always wrong", VOCAB), expected)
    )
    assert (engine.steps, engine.worker.acceptance.accepted) == (13, 0)


def test_what_a_launch_feeds_is_known_before_it(cpu, three):
    """Requests x (1 + drafts), whatever the step before accepted: lengths that grow by 4 and by 1 in turn, as here,
    have no influence. (No step feeds more than was announced: ``run`` checks that everywhere.)
    """
    expected = {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()}
    kinds = [guesses(expected, kind, VOCAB) for kind in ("oracle", "always wrong")]
    turns = dict.fromkeys(expected, 0)

    def in_turn(name, at, most):
        turns[name] += 1
        return kinds[turns[name] % 2](name, at, most)

    model = PagedOracle()
    engine = run(cpu, model, three, Setting(drafts=3), Drafter(in_turn, expected))
    assert model.launches[0] == (9, 9)
    full = [launch for launch in model.launches[1:] if launch[1] == 12]
    assert full == [(12, 12)] * 4
    assert engine.worker.acceptance.tokens_a_turn < 4


def test_room_ends_at_the_blocks_that_are_held(cpu, three):
    """With just the blocks that plain decoding needs, no request is preempted for drafts."""
    expected = {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()}
    for kind in ("oracle", "always wrong"):
        drafter = Drafter(guesses(expected, kind, VOCAB), expected)
        engine = run(cpu, PagedOracle(), three, Setting(drafts=5, blocks=12), drafter)
        assert engine.scheduler.preemptions == 0
        assert {name: tuple(entry.tokens) for name, entry in delivered(engine.worker.sink).items()} == expected


def test_invalid_logits_behind_a_draft_count_if_the_draft_is_right(cpu):
    """The tokens before them are given, and the request ends as in plain decoding; a wrong draft's row is unused."""
    model = PagedOracle()
    model.nan_after = {6}
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=9))
    expected = {"r": model.expected([1, 2, 3], 9)}
    for kind in ("oracle", "always wrong"):
        model.allocate_cache(1, 1)
        drafter = Drafter(guesses(expected, kind, VOCAB), expected)
        engine = run(cpu, model, [request], Setting(drafts=4), drafter)
        found = delivered(engine.worker.sink)["r"]
        assert (tuple(found.tokens), found.finish) == (expected["r"][:3], FinishReason.ERROR)


@pytest.mark.parametrize("draft", [VOCAB, -1])
def test_a_proposer_that_drafts_what_is_no_token_is_named(cpu, three, draft):
    drafter = Drafter(lambda *_: [draft], {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()})
    found = delivered(run(cpu, PagedOracle(), three, Setting(drafts=2), drafter).worker.sink)
    assert len(found) == len(three)
    for entry in found.values():
        assert (entry.tokens, entry.finish) == ([], FinishReason.ERROR)
        assert f"proposer Drafter drafted [{draft}]" in entry.message


def test_a_proposer_needs_a_state_with_room(cpu, three):
    with pytest.raises(InvalidValue, match="room for drafts"):
        run(cpu, PagedOracle(), three, Setting(), Drafter(lambda *_: [], {}))


class PoisonedRunner(ModelRunner):
    """An id that is not a token lies behind the drafts of each slot."""

    def propose(self, *given):
        super().propose(*given)
        view = self.state.view("draft_tokens")
        counts = self.device.copy_out(
            memory=self.state.memory, parts=[self.state.layout.groups["step_input"]], stream=self.stream
        )
        fields = self.state.columns(counts.data[0], self.state.layout.groups["step_input"])
        for slot, count in enumerate(fields["draft_num"][:, 0].tolist()):
            if count < view.shape[1]:
                self.device.async_set_value(target=view[slot, count:], value=2**40, stream=self.stream)


class Poisoned(Worker):
    runner_type = PoisonedRunner


@pytest.mark.parametrize("kind", ["partly right", "random"])
def test_what_lies_behind_the_drafts_is_never_read(cpu, three, kind):
    expected = {name: tuple(entry.tokens) for name, entry in plain(cpu, three).items()}
    drafter = Drafter(guesses(expected, kind, VOCAB), expected)
    engine = run(cpu, PagedOracle(), three, Setting(drafts=5), drafter, worker=Poisoned)
    assert {name: tuple(entry.tokens) for name, entry in delivered(engine.worker.sink).items()} == expected
