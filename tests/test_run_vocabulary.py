"""``hal run`` where a step gives an id that is not a token: only that request fails."""

import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_paddle_runner.runner import ModelRunner

SLOT, STEP = 1, 3
VOCABULARY = read_config(DEFAULT_CHECKPOINT).vocab_size


@pytest.fixture
def astray(monkeypatch):
    """Step 3 gives slot 1 the id that it is called with."""
    original, steps = ModelRunner._write, iter(range(100))

    def begin(strange):
        def write(runner, tokens):
            if next(steps) == STEP:
                for name in tokens.fields.keys() & {"sampled_token_ids", "accept_tokens"}:
                    tokens.fields[name][SLOT, 0] = strange
            original(runner, tokens)

        monkeypatch.setattr(ModelRunner, "_write", write)

    return begin


@pytest.mark.usefixtures("private_folders")
@pytest.mark.parametrize(("strange", "more"), [(VOCABULARY, ()), (-7, ("--speculate", "ngram"))])
def test_a_strange_token_is_its_requests_error(strange, more, astray, command):
    prompts = [part for text in ("def main(", "import os", "x = ", "class A") for part in ("--prompt", text)]
    options = ["run", "--device", "cpu", *prompts, "--temperature=0", "--max-tokens", "8", "--slots", "2", "--json"]
    expected = command(*options, *more).answers
    astray(strange)
    done = command(*options, *more)
    answers = done.answers
    assert done.status == 2
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length", "length"]
    message = f"the step gave token {strange}, outside the vocabulary of {VOCABULARY}"
    assert answers[1]["message"] == message
    given = answers[1]["token_ids"]
    assert given == expected[1]["token_ids"][: len(given)]
    for one, other in ((0, 0), (2, 2), (3, 3)):
        assert answers[one]["token_ids"] == expected[other]["token_ids"]
    assert "tokens in " in done.err
