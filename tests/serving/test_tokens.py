"""The official client's tokens over HTTP are those of `hal run`, in whatever order requests come."""

import asyncio
import random

import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from openai import AsyncOpenAI, OpenAI

from .conftest import HANGS, serving

PROMPTS = [
    "def main(",
    "import os\n",
    "class Tree:\n    def __init__(self",
    "for number in range(",
    "x = ",
    "try:\n    ",
]
TOKENIZER = Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))


def drawn(seed, count):
    """Requests that differ in prompt, length and sampling."""
    source = random.Random(seed)
    for _ in range(count):
        temperature = source.choice([0.0, 0.7, 1.0])
        yield {
            "prompt": source.choice(PROMPTS),
            "max_tokens": source.randint(1, 30),
            "temperature": temperature,
            "top_p": source.choice([0.8, 1.0]) if temperature else 1.0,
            "seed": source.randint(0, 2**31),
        }


def tokens_of_run(command, request):
    """The texts of the tokens that `hal run` gives for a request."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in request.items() if name != "prompt"]
    given = [one for one in options if request["temperature"] or not one.startswith("--top-p")]
    done = command("run", request["prompt"], "--device", "cpu", "--json", *given)
    assert done.status == 0
    (answer,) = done.answers
    return [TOKENIZER.decode([token]) for token in answer["token_ids"]]


def tokens_of_client(url, requests, order):
    """The same over HTTP: all at once in that order, half of them streamed; then the first one by the sync client."""

    async def ask(client, number):
        streamed = number % 2 == 1
        answer = await client.completions.create(model="default", logprobs=0, stream=streamed, **requests[number])
        events = [event async for event in answer] if streamed else [answer]
        return number, [token for event in events for token in event.choices[0].logprobs.tokens]

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANGS) as client:
            return dict(await asyncio.gather(*(ask(client, number) for number in order)))

    found = asyncio.run(all_of_them())
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANGS) as client:
        again = client.completions.create(model="default", logprobs=0, **requests[order[0]])
    assert again.choices[0].logprobs.tokens == found[order[0]]
    return [found[number] for number in range(len(requests))]


def compare(command, url, count, orders):
    requests = [*drawn(count, count)]
    expected = [tokens_of_run(command, request) for request in requests]
    for seed in range(orders):
        order = random.Random(seed).sample(range(count), count)
        assert tokens_of_client(url, requests, order) == expected


def test_tokens_are_those_of_hal_run(server, command):
    compare(command, server.url, 6, 2)


@pytest.mark.conform
def test_tokens_are_those_of_hal_run_with_speculation(command):
    with serving("--slots", "4", "--max-model-len", "256", "--speculate", "ngram", "--drafts", "3") as served:
        compare(command, served.url, 6, 2)
        accepted = lambda: served.metric("spec_decode_num_accepted_tokens_total") > 0  # noqa: E731
        served.wait_until(accepted, "no draft was accepted: nothing was speculated")


@pytest.mark.conform
@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "2"),
        ("--split", "1,1"),
        ("--dp", "2"),
        ("--tp", "2", "--speculate", "ngram"),
        ("--split", "1,1", "--speculate", "suffix"),
        ("--speculate", "ngram+suffix"),
        (),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_tokens_are_those_of_hal_run_on_ranks(options, command):
    with serving("--slots", "4", "--max-model-len", "256", *options) as served:
        compare(command, served.url, 24, 3)
