"""Drafts of the torch runner on torch's CPU: looked up as ``hal_engine.proposers.ngram`` does, and changing no
token."""

import dataclasses
import json

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import parse_config
from hal_engine.proposers.ngram import NGrams

from hal.cli import main
from tests.model.conftest import LLAMA, tensors, write

from .requests_drawn import drawn_requests
from .served import SIZES, run, torch_stepper
from .test_requests import alike

torch = pytest.importorskip("torch")
from hal_torch import drafting  # noqa: E402
from hal_torch.sampling import TROUBLES  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small random checkpoint."""
    return write(tmp_path_factory.mktemp("small"), LLAMA, tensors(parse_config(LLAMA)))


def served(directory, requests, drafts, blocks=64, sizes=SIZES, broken=None, **options):
    """Return the records of each request, and the counts of drafts."""
    sizes = dataclasses.replace(sizes, max_draft_tokens=drafts)
    with torch_stepper(directory, sizes, blocks) as stepper:
        if broken is not None:
            stepper.runner.decoder.tensors["model.embed_tokens.weight"][broken] = float("nan")
        answers, engine = run(stepper, requests, **options)
        return answers, stepper.acceptance, engine


def repeating(count, vocab, longest, controls):
    """Requests whose prompts repeat themselves: greedy, or with drawn controls and penalties that count generated
    tokens, so that a text repeats only for a while.
    """
    made = []
    for number, one in enumerate(drawn_requests(count, vocab, longest, seed=11)):
        prompt = [number % vocab, (3 * number + 1) % vocab] * (2 + number % 4)
        params = one.params if controls and number % 2 else SamplingParams(max_tokens=1, logprobs=1)
        penalty = 0.3 * (number % 4 - 1) if controls else 0.0
        params = dataclasses.replace(params, max_tokens=18, frequency_penalty=penalty)
        made.append(Request(one.request_id, prompt, params))
    return made


@pytest.mark.parametrize(
    ("drafts", "chunk", "blocks", "controls"), [(4, 256, 64, False), (1, 5, 64, True), (4, 5, 16, True)]
)
def test_drafts_change_no_token_end_or_log_probability(small, drafts, chunk, blocks, controls):
    requests = repeating(12, LLAMA["vocab_size"], SIZES.max_model_len, controls)
    options = {"chunk": chunk, "blocks": blocks}
    plain, _, waited = served(small, requests, 0, **options)
    given, acceptance, engine = served(small, requests, drafts, **options)
    alike(given, plain)
    assert acceptance.drafted > acceptance.accepted > 0
    if blocks < 64:
        assert engine.scheduler.preemptions, "blocks are to be scarce"
    elif not controls:
        assert engine.steps < waited.steps, "drafts saved no step"


def test_the_command_prints_the_same_tokens_with_drafts(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    words = ["run", "--device", "cpu", "--runner", "torch", "--dtype", "float32", "--max-tokens", "24", "--json", "-v"]
    words += ["--prompt", "for i in range("]
    answers = []
    for more in ((), ("--drafts", "4")):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        out, err = capsys.readouterr()
        assert end.value.code in (0, None), err
        answers.append(json.loads(out))
    plain, drafted = answers
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["speculation"]["tokens_a_step"] > 1
    assert "drafts accepted" in err
    assert DEFAULT_CHECKPOINT.exists()


def fields_of(rows, sizes, **columns):
    """Fields of a state in which each slot has a row of tokens, and decodes."""
    count = len(rows)
    tokens = torch.full((count, sizes.max_model_len), -1, dtype=torch.int64)
    for row, known in enumerate(rows):
        tokens[row, : len(known)] = torch.tensor(known)
    lengths = torch.tensor([len(known) for known in rows])
    made = {
        "token_ids": tokens,
        "prompt_lens": (lengths - 1).clamp(min=0),
        "step_idx": (lengths > 0).long(),
        "max_dec_len": torch.full((count,), 1 << 20),
        "blocks_num": torch.full((count,), sizes.max_blocks, dtype=torch.int32),
        "seq_lens_this_time": torch.ones(count, dtype=torch.int32),
        "seq_lens_encoder": torch.zeros(count, dtype=torch.int32),
        "stop_flags": torch.zeros(count, dtype=torch.bool),
        "accept_num": torch.ones(count, dtype=torch.int32),
        "draft_num": torch.zeros(count, dtype=torch.int32),
        "draft_tokens": torch.full((count, sizes.max_draft_tokens), -1),
    }
    return made | {name: torch.tensor(values) for name, values in columns.items()}


class TestLookUp:
    """Where drafts come from."""

    SIZES = StateConfig(64, 32, 4, max_draft_tokens=5)

    def test_it_finds_what_the_proposer_on_the_host_finds(self):
        rng, rows = np.random.default_rng(5), []
        for length in [1, 2, 3, 4, 5, 6] * 4 + rng.integers(1, 25, 40).tolist():
            rows.append(rng.integers(0, 1 + int(rng.integers(1, 4)), length).tolist())
        fields = fields_of(rows, self.SIZES)
        drafting.draft(fields, self.SIZES)
        found = 0
        for row, known in enumerate(rows):
            wanted = NGrams(np.array(known)).guess([], 5).drafts
            count = int(fields["draft_num"][row])
            assert fields["draft_tokens"][row, :count].tolist() == list(wanted), known
            assert fields["draft_tokens"][row, count:].tolist() == [-1] * (5 - count)
            assert int(fields["seq_lens_this_time"][row]) == 1 + count
            found += count > 0
        assert found > 30

    @pytest.mark.parametrize(
        ("columns", "room"),
        [
            ({}, 5),
            ({"max_dec_len": [3]}, 1),
            ({"max_dec_len": [2]}, 0),
            ({"blocks_num": [2]}, 2),
            ({"stop_flags": [True]}, None),
            ({"seq_lens_this_time": [0]}, None),
            ({"seq_lens_encoder": [4]}, None),
            ({"accept_num": [0]}, None),
        ],
    )
    def test_drafts_have_room_and_go_to_who_goes_on(self, columns, room):
        fields = fields_of([[7, 7, 7, 7, 7, 7]], self.SIZES, **columns)
        before = {name: value.clone() for name, value in fields.items()}
        drafting.draft(fields, self.SIZES)
        if room is None:
            assert all(torch.equal(fields[name], value) for name, value in before.items())
        else:
            assert fields["draft_num"].tolist() == [room]
            assert fields["draft_tokens"][0].tolist() == [7] * room + [-1] * (5 - room)

    def test_a_row_that_is_nearly_full_gets_what_fits(self):
        fields = fields_of([[7] * 29], self.SIZES)
        drafting.draft(fields, self.SIZES)
        assert fields["draft_num"].tolist() == [2]  # the token behind them is the last that fits


class TestVerified:
    """The kept drafts."""

    @pytest.mark.parametrize(
        ("sampled", "sound", "fed", "count"),
        [
            ([5, 6, 7], [1, 1, 1], [1, 1, 1], 3),
            ([5, 9, 7], [1, 1, 1], [1, 1, 1], 2),
            ([9, 6, 7], [1, 1, 1], [1, 1, 1], 1),
            ([5, 6, 7], [1, 1, 0], [1, 1, 1], 2),
            ([5, 6, 7], [1, 0, 1], [1, 1, 1], 1),
            ([5, 6, 7], [0, 1, 1], [1, 1, 1], 0),
            ([5, 6, 7], [1, 0, 0], [1, 0, 0], 1),
            ([5, 6, 7], [0, 0, 0], [0, 0, 0], 0),
        ],
    )
    def test_a_run_ends_at_the_first_that_differs_or_is_no_use(self, sampled, sound, fed, count):
        given = (torch.tensor([sampled]), torch.tensor([sound]).bool(), torch.tensor([fed]).bool())
        assert drafting.accepted(*given, torch.tensor([[5, 6]])).tolist() == [count]

    def test_a_request_that_meets_a_useless_token_is_given_the_same_as_without(self, small):
        """The drafts of a repeating request are confirmed up to the invalid token."""
        greedy = SamplingParams(max_tokens=20)
        requests = [Request(f"r{number}", [number, number + 1] * 3, greedy) for number in range(6)]
        answers, _, _ = served(small, requests, 0)
        broken = next(one.tokens[9] for one in answers.values() if one.tokens[9] not in range(8))
        plain, _, _ = served(small, requests, 0, broken=broken)
        given, acceptance, _ = served(small, requests, 4, broken=broken)
        assert {one.message for one in plain.values()} >= {TROUBLES[1]}
        alike(given, plain)
        assert acceptance.accepted
