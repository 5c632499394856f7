"""MTP in the main job: its drafts are the dense layer's, and they change no token."""

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.proposers import Setup, make_proposer
from hal_engine.sampling import STATE_FIELDS, SamplingRows, sample
from hal_paddle_runner.mtp import Mtp
from hal_paddle_runner.worker import Worker

from tests import share

MARGIN = 1e-3
COMMON = {"temperature": 0.0, "max_tokens": 28}
PROMPTS = ("def main(", "try:\n    import os\nexcept ImportError:\n    ", "for i in range(10):\n", "class A:\n")


@pytest.fixture(scope="module")
def requests(model):
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, model.config)
    kinds = ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}, {"frequency_penalty": 0.5})
    return [
        Request(
            f"r{n}", tokenizer.encode(text), SamplingParams(**{"temperature": 0.0, "max_tokens": 28, "seed": n} | kind)
        )
        for n, (text, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


class Checked(Mtp):
    """Each first draft is the dense layer's, or drawn from it with the position's random number, given the known
    tokens.
    """

    def __init__(self, setup, dense):
        super().__init__(setup)
        self.dense, self.checked, self.moved, self.drafted = dense, 0, 0, 0

    def observe(self, fed):
        super().observe(fed)
        self.drafted += sum(fed.drafted)

    def propose(self, room):
        fields, places = self._fed.fields, dict(zip(self._fed.slots, self._fed.places, strict=True))
        self.moved += sum(slot != place for slot, place in places.items())
        drafts = super().propose(room)
        for slot, tokens in drafts.items():
            assert 1 <= len(tokens) <= room[slot]
            known = self._sequences[slot].tokens[: self._sequences[slot].count]
            columns = {name: fields[name][[places[slot]]] for name in STATE_FIELDS.values()}
            columns["step_idx"] = len(known) - fields["prompt_lens"][[places[slot]]]
            for name, neutral in (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1)):
                columns[name] = np.full((1, 1), neutral, np.float32)
            rows = SamplingRows.from_state(columns, prompt=None, output=None)
            expected = sample(self.dense.mtp_logits(known)[-1:].astype(np.float32), rows, logprobs=None)
            if expected.margins[0] >= MARGIN:
                assert tokens[0] == expected.tokens[0]
                self.checked += 1
        assert set(drafts) == {slot for slot, most in room.items() if most}
        return drafts


def run(model, requests, *, drafts, blocks=64, chunk=256, slots=4, proposer=None):
    sizes = StateConfig(num_slots=slots, max_model_len=512, max_draft_tokens=drafts)
    with bind(CpuPlugin.open(0, {})) as device:
        engine = Engine(Worker(device, model, sizes, blocks, MemorySink(), proposer=proposer), Limits(chunk=chunk))
        for request in requests:
            engine.submit(request)
        return {ended.request_id: ended.token_ids for ended in engine.run()}, engine


@pytest.fixture(scope="module")
def plain(model, requests):
    return run(model, requests, drafts=0, slots=1)[0]


AMPLE, SCARCE = (64, 256), (6, 3)
"""Blocks, and tokens of a piece of a prompt."""


@pytest.mark.parametrize(
    ("drafts", "blocks", "chunk"),
    share.cases(
        [(drafts, *room) for drafts in (1, 3, 5) for room in (AMPLE, SCARCE)],
        {(5, *AMPLE), (3, *SCARCE)}.__contains__,
    ),
)
def test_drafts_are_the_dense_layers_and_change_no_token(model, dense, requests, plain, drafts, blocks, chunk):
    proposer = Checked(Setup(drafts, 4, 512, model.config.vocab_size, model), dense)
    found, engine = run(model, requests, drafts=drafts, blocks=blocks, chunk=chunk, proposer=proposer)
    assert found == plain
    assert proposer.checked > 20
    assert proposer.drafted == engine.worker.acceptance.drafted > 0
    assert proposer.moved, "the proposer's state has the target's slot order: a test of nothing"
    assert (engine.scheduler.preemptions > 0) == (blocks == 6)
    assert engine.worker.acceptance.tokens_a_turn > 1.3
    assert proposer._sequences == {}


class Seldom(Checked):
    """Drafts are requested only in each seventh step; count the calls of the layer."""

    def __init__(self, setup, dense):
        super().__init__(setup, dense)
        self.steps, self.fed = 0, []

    def _feed(self, sequences, tables, drafting):
        self.fed.append((drafting, [sequence.waiting for sequence in sequences]))
        return super()._feed(sequences, tables, drafting)

    def propose(self, room):
        self.steps += 1
        return {} if self.steps % 7 and not Mtp.propose(self, {}) else super().propose(room)


@pytest.mark.parametrize("most", [64, 5])
def test_entries_wait_for_the_first_wanted_draft_and_run_in_one_call(model, dense, requests, plain, monkeypatch, most):
    """Or without a draft, if too many wait; later drafts are the usual ones."""
    monkeypatch.setattr("hal_paddle_runner.mtp.MOST_WAITING", most)
    proposer = Seldom(Setup(3, 4, 512, model.config.vocab_size, model), dense)
    found, _ = run(model, requests, drafts=3, proposer=proposer)
    assert found == plain
    assert proposer.checked > 5
    wanted, others = (
        [waiting for drafting, waiting in proposer.fed if bool(drafting) == kind] for kind in (True, False)
    )
    assert len(wanted) <= proposer.steps / 7
    assert max(map(max, wanted)) > 1
    assert all(waiting >= most for waits in others for waiting in waits)
    assert bool(others) == (most == 5)


@pytest.mark.parametrize("name", ["mtp", "hybrid", "mtp+suffix"])
def test_by_name_with_what_goes_on_from_it(model, requests, plain, name):
    proposer = make_proposer(name, Setup(4, 4, 512, model.config.vocab_size, model))
    found, engine = run(model, requests, drafts=4, proposer=proposer)
    assert found == plain
    assert engine.worker.acceptance.tokens_a_turn > 1.2


def test_deeper_drafts_are_worth_having(model, requests, plain):
    """Greedy text: of three drafts more are accepted than of one, so the layer does continue from its own output."""
    rates = []
    for drafts in (1, 3):
        proposer = Mtp(Setup(drafts, 4, 512, model.config.vocab_size, model))
        found, engine = run(model, requests[:1], drafts=drafts, proposer=proposer)
        assert found["r0"] == plain["r0"]
        rates.append(engine.worker.acceptance.tokens_a_turn)
    assert rates[1] > rates[0] + 0.3


def test_a_model_without_the_layer_is_refused():
    with pytest.raises(InvalidValue, match="no model with a prediction layer"):
        Mtp(Setup(3, 4, 512, 100))
