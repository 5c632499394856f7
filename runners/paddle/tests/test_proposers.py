"""Proposers in whole runs: they change no request's tokens, and mirror the device's state."""

import numpy as np
import pytest
from hal_core import ByteRange
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason
from hal_engine.proposers import Setup, make_proposer
from hal_engine.proposers.hybrid import Hybrid
from hal_engine.proposers.ngram import NGram
from hal_engine.proposers.suffix import Suffix
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hal
from tests import share

from .conftest import VOCAB, PagedOracle
from .drafters import Setting, delivered, serve
from .drafters import run as run_plain

SETUP = Setup(max_draft_tokens=5, num_slots=4, max_model_len=32, vocab_size=VOCAB)
few = st.integers(0, 4)


class Loops(PagedOracle):
    """Each token depends on the two before it and is one of four, so that a text soon repeats itself."""

    def logits(self, known):
        logits = np.zeros(VOCAB, np.float32)
        best = (2 * known[-1] + sum(known[-2:-1]) + 1) % 3
        logits[best], logits[best + 1], logits[7] = 9.0, 8.0, 7.0
        return np.full(VOCAB, np.nan, np.float32) if len(known) in self.nan_after else logits


def run(device, requests, setting, proposer, *, arrivals=(), aborts=(), after=lambda worker: None):
    """Serve all requests; return the engine at the end. ``after``: called after each step."""
    given = {"arrivals": arrivals, "aborts": aborts, "after": lambda engine: after(engine.worker)}
    return serve(device, Loops(), requests, setting, proposer, **given)


def mirrors(proposer):
    """Return the composed proposers that keep tokens on the host."""
    if isinstance(proposer, Hybrid):
        return [proposer.first, proposer.second]
    return [proposer] if isinstance(proposer, NGram | Suffix) else []


def equal_to_the_device(proposer):
    """Return a check, for after each step, that a proposer's tokens are the device's (G12)."""
    kept = mirrors(proposer)
    seen = []

    def check(worker):
        state, layout = worker.state, worker.layout
        place, slots = layout.fields["token_ids"], state.sizes.num_slots
        parts = (
            layout.groups["step_input"],
            layout.groups["output"],
            ByteRange(place.offset, place.stride * slots),
        )
        copied = worker.device.copy_out(memory=state.memory, parts=parts, stream=worker.stream)
        copied.wait()
        fields = state.columns(copied.data[0], parts[0]) | state.columns(copied.data[1], parts[1])
        token_ids = copied.data[2].view(np.int64).reshape(slots, -1)
        for slot, request in enumerate(state.host_table.requests):
            if request is not None:
                known = int(fields["prompt_lens"][slot, 0] + fields["step_idx"][slot, 0])
                on_device = token_ids[slot, :known].tolist()
                seen.append(known)
                for one in kept:
                    assert one.tokens(slot).tolist() == on_device, (slot, request.request_id)

    return check, seen


def make(name):
    """Make a proposer by a name, of which ``bare`` ones are not adapted; return it, and the parts that keep tokens."""
    bare = {"ngram, bare": NGram, "suffix, bare": Suffix}.get(name)
    if bare is not None:
        return (proposer := bare(SETUP)), proposer
    return (proposer := make_proposer(name, SETUP)), proposer.inner


NAMES = ("naive", "ngram", "suffix", "ngram+suffix", "ngram, bare", "suffix, bare")
params_ = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 18),
        "min_tokens": st.sampled_from([0, 0, 1, 5]),
        "temperature": st.sampled_from([0.0, 0.0, 0.7]),
        "seed": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "bad_words": st.lists(few, max_size=1).map(tuple),
        "eos_token_ids": st.sampled_from([(), (), (7,)]),
        "stop_sequences": st.lists(st.lists(few, min_size=2, max_size=3).map(tuple), max_size=1).map(tuple),
        "logprobs": st.sampled_from([None, 2]),
    }
).map(lambda p: SamplingParams(**p | {"min_tokens": min(p["min_tokens"], p["max_tokens"])}))


@pytest.fixture(scope="module")
def cpu():
    with hal.open_device("cpu") as device:
        yield device


@settings(
    phases=[Phase.generate], max_examples=share.of(40), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_proposer_changes_tokens_and_each_mirrors_the_device(cpu, data):
    """Controls on; chunked prefill beside it, scarce blocks with preemption, aborts at any step."""
    prompts = data.draw(st.lists(st.lists(few, min_size=1, max_size=13), min_size=1, max_size=5), label="prompts")
    requests = [Request(f"r{n}", prompt, data.draw(params_)) for n, prompt in enumerate(prompts)]
    plain = delivered(run_plain(cpu, Loops(), requests, Setting(slots=1)).worker.sink)
    proposer, inner = make(data.draw(st.sampled_from(NAMES), label="proposer"))
    setting = Setting(
        slots=data.draw(st.integers(1, 4), label="slots"),
        blocks=data.draw(st.integers(8, 24), label="blocks"),
        chunk=data.draw(st.sampled_from([1, 3, 256]), label="chunk"),
        drafts=data.draw(st.integers(1, 5), label="drafts"),
    )
    arrivals = [data.draw(st.integers(0, 4)) for _ in requests]
    names = [request.request_id for request in requests]
    aborts = data.draw(st.lists(st.tuples(st.integers(1, 12), st.sampled_from(names)), max_size=2), label="aborts")
    check, _ = equal_to_the_device(inner)
    found = delivered(run(cpu, requests, setting, proposer, arrivals=arrivals, aborts=aborts, after=check).worker.sink)
    for name, expected in plain.items():
        entry = found.get(name)
        if entry is None or entry.finish is FinishReason.ABORT:
            assert name in {aborted for _, aborted in aborts}
        else:
            assert (entry.finish, len(entry.tokens)) == (expected.finish, len(expected.tokens))
        if entry is not None:
            assert entry.tokens == expected.tokens[: len(entry.tokens)]
            same_logprobs(entry.logprobs, expected.logprobs)
    for one in mirrors(inner):
        with pytest.raises(KeyError):
            one.tokens(0)


def same_logprobs(found, expected):
    for (ids, values, rank), (ids_, values_, rank_) in zip(found, expected, strict=False):
        assert (ids, rank) == (ids_, rank_)
        np.testing.assert_allclose(values, values_, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", ["ngram", "suffix", "ngram+suffix"])
def test_a_text_that_repeats_itself_takes_fewer_steps(device, name):
    requests = [Request(f"r{n}", [n % 5, n], SamplingParams(max_tokens=24)) for n in range(4)]
    proposer, inner = make(name)
    check, seen = equal_to_the_device(inner)
    with hal.open_device(device) as opened:
        engine = run(opened, requests, Setting(slots=2, drafts=5), proposer, after=check)
        plain = run(opened, requests, Setting(slots=2), None)
    assert delivered(engine.worker.sink) == delivered(plain.worker.sink)
    assert len(seen) > 8
    assert engine.worker.acceptance.tokens_a_turn > 2
    assert engine.steps < plain.steps * 0.65


def test_a_request_that_is_resumed_is_known_from_its_beginning(cpu):
    """Scarce blocks: a preempted request enters again with its prompt and its output."""
    requests = [Request(f"r{n}", [n % 5] * 6, SamplingParams(max_tokens=20)) for n in range(4)]
    proposer, inner = make("suffix")
    check, _ = equal_to_the_device(inner)
    engine = run(cpu, requests, Setting(slots=4, drafts=3, blocks=16), proposer, after=check)
    assert engine.scheduler.preemptions > 0
    assert {name: entry.tokens for name, entry in delivered(engine.worker.sink).items()} == {
        name: entry.tokens for name, entry in delivered(run(cpu, requests, Setting(slots=4), None).worker.sink).items()
    }
    assert len(inner.shared) == 4
