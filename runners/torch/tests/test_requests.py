"""Served requests: every control at once, many prompts in a step beside decoding, and requests that spoil no other."""

import dataclasses

import numpy as np
import pytest
from hal_core import Request, SamplingParams
from hal_engine.model.config import parse_config

from tests.model.conftest import LLAMA, tensors, write

from .requests_drawn import drawn_requests
from .served import SIZES, by_paddle, by_torch, run, torch_stepper

torch = pytest.importorskip("torch")
from hal_torch.plan import Piece, Plan, Size, captured_sizes, packed, size_of  # noqa: E402
from hal_torch.sampling import TROUBLES  # noqa: E402
from hal_torch.steps import Layers  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small random checkpoint."""
    return write(tmp_path_factory.mktemp("small"), LLAMA, tensors(parse_config(LLAMA)))


def alike(given, expected):
    """Tokens, ends and log-probabilities of the same requests; values but for rounding."""
    assert given.keys() == expected.keys()
    for name, one in given.items():
        other = expected[name]
        assert (one.tokens, one.message, one.reason) == (other.tokens, other.message, other.reason), name
        for (ids, values, ranks), (their_ids, their_values, their_ranks) in zip(
            one.logprobs, other.logprobs, strict=True
        ):
            assert (ids, ranks) == (their_ids, their_ranks), name
            np.testing.assert_allclose(values, their_values, atol=1e-4)


@pytest.mark.parametrize(("chunk", "blocks"), [(256, 64), (5, 64), (64, 20)])
def test_every_control_gives_what_the_paddle_model_gives(small, chunk, blocks):
    pytest.importorskip("paddle")
    requests = drawn_requests(24, LLAMA["vocab_size"], SIZES.max_model_len)
    options = {"blocks": blocks, "chunk": chunk}
    given, expected = by_torch(small, requests, **options), by_paddle(small, requests, **options)
    assert sum(len(one.tokens) for one in given.values()) > 150
    assert any(one.logprobs for one in given.values())
    alike(given, expected)


@pytest.mark.parametrize("room", [Size(64, 256, 4), Size(128, 512, 4)])
def test_padding_to_a_captured_size_changes_no_token(small, room, monkeypatch):
    requests = drawn_requests(12, LLAMA["vocab_size"], SIZES.max_model_len, seed=3)
    plain = by_torch(small, requests, chunk=40)
    taken = []
    monkeypatch.setattr("hal_torch.runner.size_of", lambda pieces, sizes: taken.append(len(pieces)) or room)
    alike(by_torch(small, requests, chunk=40), plain)
    assert max(taken) > 1, "no step had several prompts"


def test_prompts_of_a_step_are_one_run_with_the_slots_that_decode(small):
    requests = [Request(f"r{n}", [3 + n] * 6, SamplingParams(max_tokens=3 + 4 * n)) for n in range(8)]
    with torch_stepper(small) as stepper:
        steps, ran = stepper.runner._steps, []
        real = steps.run
        steps.run = lambda part: (ran.append(part), real(part))
        answers, _ = run(stepper, requests, chunk=24)
    seen = [(part.size.tokens, part.decodes) for part in ran if isinstance(part, Layers)]
    assert len(seen) == stepper.steps, "a step ran its layers more than once"
    assert seen[0] == (32, False)  # four prompts of 6 tokens, rounded up
    assert any(tokens and decodes for tokens, decodes in seen)
    assert all(
        len(one.tokens) == request.params.max_tokens for one, request in zip(answers.values(), requests, strict=True)
    )


class TestUseless:
    """Requests whose numbers are no use."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("chunk", [256, 2])
    def test_it_ends_alone_and_at_once(self, small, value, chunk):
        requests = [Request(f"good{n}", [5 + n, 9], SamplingParams(max_tokens=8)) for n in range(2)]
        expected = by_torch(small, requests, chunk=chunk)
        bad = Request("bad", [60, 5, 6, 7], SamplingParams(max_tokens=8))
        with torch_stepper(small) as stepper:
            stepper.runner.decoder.tensors["model.embed_tokens.weight"][60] = value
            answers, _ = run(stepper, [requests[0], bad, requests[1]], chunk=chunk)
        assert answers["bad"].message == TROUBLES[1]
        assert answers["bad"].tokens == []
        for name, one in expected.items():
            assert answers[name].tokens == one.tokens
            assert not answers[name].message

    def test_what_follows_in_its_blocks_is_not_spoilt(self, small):
        later = Request("later", [5, 9, 11], SamplingParams(max_tokens=8))
        expected = by_torch(small, [later])
        with torch_stepper(small, dataclasses.replace(SIZES, num_slots=1), blocks=4) as stepper:
            stepper.runner.decoder.tensors["model.embed_tokens.weight"][60] = float("nan")
            answers, _ = run(stepper, [Request("bad", [60] * 6, SamplingParams(max_tokens=3)), later])
        assert answers["bad"].message == TROUBLES[1]
        assert answers["later"].tokens == expected["later"].tokens

    def test_a_request_whose_tokens_are_all_masked_says_so(self, small):
        vocab = LLAMA["vocab_size"]
        sizes = dataclasses.replace(SIZES, max_bad_words=vocab)
        bad = Request("bad", [5], SamplingParams(max_tokens=4, bad_words=tuple(range(vocab))))
        answers = by_torch(small, [bad, Request("good", [5], SamplingParams(max_tokens=4))], sizes)
        assert answers["bad"].message == TROUBLES[3]
        assert len(answers["good"].tokens) == 4


class TestPlan:
    """The plan of a step's prompts."""

    def test_it_names_every_piece_and_last_token(self):
        pieces = [Piece(2, 3, 6, True), Piece(0, 0, 2, False)]
        assert size_of(pieces, ()) == Size(16, 16, 2)
        plan = Plan.of(packed(pieces, 4).tolist(), 4)
        assert plan.last == [-1, -1, 2, -1]
        assert (plan.token_ends, plan.key_ends) == ([0, 3, 5, 5, 5], [0, 6, 8, 8, 8])
        assert (plan.slots, plan.starts) == ([2, 0, 0, 0], [3, 0, 0, 0])

    def test_the_device_spreads_it_over_tokens_and_keys(self, small):
        pieces = [Piece(2, 3, 6, True), Piece(0, 0, 2, False)]
        plan = Plan.of(torch.tensor(packed(pieces, 4)), 4)
        with torch_stepper(small) as stepper:
            spread = stepper.runner._steps._spread
            slots, positions = spread(plan.token_ends, plan.starts, plan, 16, 2)
            key_slots, key_positions = spread(plan.key_ends, None, plan, 16, 3)
        assert slots.tolist() == [2, 2, 2] + [0] * 13
        assert positions.tolist() == [3, 4, 5, 0, 1] + [-1] * 11
        assert key_slots.tolist() == [2] * 6 + [0] * 10
        assert key_positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1] + [-1] * 8

    @pytest.mark.parametrize(("slots", "longest"), [(1, 1), (4, 10), (4, 1024), (128, 8192), (2, 131072)])
    def test_a_captured_size_holds_every_prompt_that_begins(self, slots, longest):
        sizes, most = captured_sizes(slots, longest), slots * longest
        assert len(sizes) == len(set(sizes)) <= 22
        for length in {1, min(most // 2, 700), min(most, 2048)} - {0}:
            found = size_of([Piece(0, 0, length, True)], sizes)
            assert found in sizes
            assert found.tokens >= length <= found.keys

    def test_the_smallest_captured_size_is_taken(self):
        sizes = captured_sizes(64, 32768)
        assert size_of([Piece(0, 0, 100, True)], sizes) == Size(128, 128, 32)
        assert size_of([Piece(0, 400, 500, True)], sizes) == Size(128, 512, 32)
        assert size_of([Piece(0, 30000, 30100, True)], sizes) == Size(512, 32768, 32)
        assert size_of([Piece(0, 30000, 32048, False)], sizes) == Size(2048, 32768, 32)
        assert size_of([Piece(0, 0, 3000, True)], sizes) == Size(3008, 3008, 1)
        assert size_of([Piece(slot, 0, 2, True) for slot in range(40)], sizes) == Size(80, 80, 40)
