"""Every kind of checkpoint that the Paddle model takes: at float32 the tokens are the published definitions'."""

import numpy as np
import pytest
from hal_core import Request, SamplingParams
from hal_engine.model.config import parse_config

from runners.paddle.tests.test_checkpoints import FAMILIES, LEAD, NEW_TOKENS, PROMPTS
from runners.paddle.tests.test_checkpoints import SIZES as FIELDS
from tests.model.conftest import LLAMA, VARIANTS, tensors, write
from tests.model.reference import Reference

from .served import by_paddle, by_torch

pytest.importorskip("torch")
KINDS = [(family, number % 2 == 0, 1 + 2 * (number % 3 == 0)) for number, family in enumerate(FAMILIES)]
"""Family, whether embeddings are tied, and files."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Write a small random checkpoint of some fields."""

    def make(fields, **options):
        return write(tmp_path_factory.mktemp("checkpoint"), fields, tensors(parse_config(fields)), **options)

    return make


@pytest.mark.parametrize(("family", "tied", "shards"), KINDS)
def test_the_tokens_are_the_references(saved, family, tied, shards):
    directory = saved(FIELDS | FAMILIES[family] | {"tie_word_embeddings": tied}, shards=shards)
    reference = Reference(directory)
    expected, leads = zip(*(reference.generate(prompt, NEW_TOKENS) for prompt in PROMPTS), strict=True)
    assert min(leads) > LEAD
    requests = [Request(str(n), p, SamplingParams(max_tokens=NEW_TOKENS)) for n, p in enumerate(PROMPTS)]
    for chunk in (256, 4):
        answers = by_torch(directory, requests, chunk=chunk)
        assert [tuple(answers[str(number)].tokens) for number in range(len(PROMPTS))] == [*expected]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tokens_are_the_paddle_models_in_float32(saved, variant, dtype):
    pytest.importorskip("paddle")
    directory = saved(LLAMA | VARIANTS[variant], dtype=dtype)
    drawn = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 12}
    requests = [Request(f"r{n}", p, SamplingParams(seed=n, **drawn)) for n, p in enumerate(PROMPTS)]
    requests.append(Request("greedy", PROMPTS[0], SamplingParams(max_tokens=12)))
    given, expected = (by(directory, requests, chunk=9) for by in (by_torch, by_paddle))
    assert {n: one.tokens for n, one in given.items()} == {n: one.tokens for n, one in expected.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_auto_computes_in_the_type_of_the_file(saved, dtype):
    """In half the precision tokens may differ; the first choice has a lead here."""
    directory = saved(LLAMA, dtype=dtype)
    request = Request("r", PROMPTS[1], SamplingParams(max_tokens=1, logprobs=1))
    half = by_torch(directory, [request], dtype="auto")["r"]
    exactly = by_torch(directory, [request], dtype="float32")["r"]
    (((_, near, _),), ((_, exact, _),)) = half.logprobs, exactly.logprobs
    assert half.tokens == exactly.tokens
    assert np.abs(near - exact).max() < 0.05
    assert (near != exact).any()
