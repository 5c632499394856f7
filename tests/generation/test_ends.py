"""End tokens, ``ignore_eos``, ``min_tokens`` and stop texts are four things, in the command and the library alike."""

import asyncio
import json
import shutil

import pytest
from hal_core import FinishReason, InvalidValue
from hal_engine.model import DEFAULT_CHECKPOINT

import hal

PROMPT, TOKENS, AT = "def main(", 24, 5
GREEDY = ("--device", "cpu", "--temperature", "0", "--max-tokens", TOKENS)


@pytest.fixture
def run(command):
    """Run the command here; return its answer."""

    def call(*arguments, model=DEFAULT_CHECKPOINT):
        done = command("run", PROMPT, "--model", model, "--json", *GREEDY, *arguments)
        assert done.status == 0
        (answer,) = done.answers
        return answer

    return call


@pytest.fixture
def unended(run):
    """The answer if nothing ends it."""
    return run()


@pytest.fixture
def model(tmp_path, unended):
    """The shipped model, with a token of that answer as its end token."""
    shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "model" / name
        facts = json.loads(path.read_bytes()) if path.exists() else {}
        path.write_text(json.dumps(facts | {"eos_token_id": unended["token_ids"][AT]}))
    return tmp_path / "model"


@pytest.mark.parametrize("drafts", [(), ("--speculate", "ngram"), ("--overlap", "off")])
def test_an_ignored_end_token_is_sampled_and_ends_nothing(run, unended, model, drafts):
    end = unended["token_ids"][AT]
    ended = run(*drafts, model=model)
    assert (ended["finish_reason"], ended["token_ids"]) == (
        "stop",
        unended["token_ids"][: unended["token_ids"].index(end) + 1],
    )
    ignored = run("--ignore-eos", *drafts, model=model)
    assert (ignored["finish_reason"], ignored["token_ids"]) == ("length", unended["token_ids"])


@pytest.mark.parametrize("drafts", [(), ("--speculate", "ngram")])
def test_min_tokens_masks_end_tokens_and_ignoring_them_does_not(run, unended, model, drafts):
    end = unended["token_ids"][AT]
    least = run("--min-tokens", 12, *drafts, model=model)["token_ids"]
    assert len(least) >= 12
    assert end not in least[:11]
    assert run("--ignore-eos", "--min-tokens", 12, *drafts, model=model)["token_ids"] == unended["token_ids"]


def test_a_stop_text_ends_an_answer_that_ignores_end_tokens(run, unended, model):
    stop = unended["text"][20:24]
    answer = run("--ignore-eos", "--stop", stop, model=model)
    assert (answer["finish_reason"], answer["text"]) == ("stop", unended["text"].partition(stop)[0] + stop)


def test_a_line_of_prompts_may_ignore_end_tokens(command, tmp_path, unended, model):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": PROMPT, "ignore_eos": one}) + "\n" for one in (True, False)))
    done = command("run", "--prompts", lines, "--model", model, "--json", *GREEDY)
    assert [answer["finish_reason"] for answer in done.answers] == ["length", "stop"]
    lines.write_text(json.dumps({"prompt": PROMPT, "ignore_eos": "yes"}))
    done = command("run", "--prompts", lines)
    assert done.status == 2
    assert "line 1: ignore_eos = 'yes' (give true or false)" in done.err


def test_the_library_ends_answers_as_the_command_does(unended, model):
    given = {"model": model, "device": "cpu", "temperature": 0.0, "max_tokens": TOKENS}
    assert hal.generate(PROMPT, **given, ignore_eos=True) == unended["text"]
    assert len(hal.generate(PROMPT, **given)) < len(unended["text"])
    stop = unended["text"][20:24]
    assert hal.generate(PROMPT, **given, ignore_eos=True, stop=stop) == unended["text"].partition(stop)[0] + stop
    with pytest.raises(InvalidValue, match="ignore_eos"):
        hal.generate(PROMPT, **given, ignore_eos="no")


def test_an_engine_process_ends_answers_as_the_command_does(unended, model):
    params = {"temperature": 0.0, "max_tokens": TOKENS}
    last, later = unended["token_ids"][AT], unended["token_ids"][AT + 3]

    async def answers():
        async def tokens(**changed):
            parts = [part async for part in engine.generate(PROMPT, {**params, **changed})]
            return [token for part in parts for token in part.token_ids], parts[-1].finish_reason

        async with hal.AsyncEngine(model, "cpu", slots=4) as engine:
            with pytest.raises(InvalidValue, match="eos_token_ids: 17 ids"):
                await tokens(eos_token_ids=range(17))
            with pytest.raises(InvalidValue, match="eos_token_ids: token 99999 is outside the vocabulary"):
                await tokens(eos_token_ids=(99999,))
            own = (later, *range(1, 16))
            return await asyncio.gather(tokens(), tokens(ignore_eos=True), tokens(ignore_eos=True, eos_token_ids=own))

    plain, ignored, own = asyncio.run(answers())
    upto = unended["token_ids"].index(last) + 1
    assert plain == (unended["token_ids"][:upto], FinishReason.STOP)
    assert ignored == (unended["token_ids"], FinishReason.LENGTH)
    first = next(at for at, token in enumerate(unended["token_ids"]) if token in (later, *range(1, 16)))
    assert own == (unended["token_ids"][: first + 1], FinishReason.STOP)
