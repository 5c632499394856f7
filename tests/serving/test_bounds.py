"""What a client chooses is bounded before it costs anything, and a stopped engine process is noticed."""

import asyncio
import os
import signal

import httpx
import pytest
from hal_core import Unavailable
from hal_engine.generation.async_engine import QueueFull
from hal_engine.generation.plan import ModelPlan
from hal_engine.model.tokenizer import SHORT, TooLong

import hal

from .conftest import serving


def ask(server, **body):
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1, **body}, timeout=60)


@pytest.mark.parametrize(
    ("stop", "what"),
    [(["x"] * 17, "17 texts (give at most 16)"), (["x" * 257], "a text of 257 characters (give at most 256)")],
)
def test_stop_texts_beyond_the_bounds_are_refused_by_name(server, stop, what):
    answer = ask(server, stop=stop)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"
    assert answer.json()["error"]["message"] == f"stop: {what}"
    assert ask(server, stop=["x" * 256] * 16).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
def test_a_text_whose_bytes_cannot_fit_is_refused(server, route):
    answer = httpx.post(f"{server.url}{route}", json={"prompt": "a" * 1_000_000}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "1000000 characters are at least" in answer.json()["error"]["message"]


def test_ids_that_are_too_many_are_not_looked_at():
    class Ids(list):
        def __iter__(self):
            raise AssertionError("each of them is looked at")

    engine = hal.AsyncEngine(device="cpu", max_model_len=16)
    with pytest.raises(TooLong, match="17 tokens of the prompt"):
        engine.check(Ids(range(17)), 1)


def ids_of(text):
    return ModelPlan(None).tokenizer.encode(text)


def test_prompts_that_wait_to_be_encoded_are_bounded_and_long_ones_delay_no_short_ones():
    async def run():
        engine = hal.AsyncEngine(device="cpu", slots=2, max_waiting=1, max_model_len=512)
        held, tokenizer = asyncio.Event(), engine.plan.tokenizer
        loop, encode = asyncio.get_running_loop(), tokenizer.encode_all

        def hold(texts, **how):
            if len(texts[0]) > SHORT:
                asyncio.run_coroutine_threadsafe(held.wait(), loop).result()
            return encode(texts, **how)

        tokenizer.encode_all = hold
        long = [asyncio.create_task(engine.encode(["a" * (SHORT + 1)])) for _ in range(2)]
        await asyncio.sleep(0)  # both have begun
        assert await engine.encode(["a"]) == [ids_of("a")]
        more = asyncio.create_task(engine.encode(["a" * (SHORT + 1)]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 requests wait for their prompts to be encoded"):
            await engine.encode(["a"])
        more.cancel()
        held.set()
        assert [len(ids) for (ids,) in await asyncio.gather(*long)] == [len(ids_of("a" * (SHORT + 1)))] * 2
        assert await engine.encode(["a"]) == [ids_of("a")]
        with pytest.raises(TooLong):
            await engine.encode(["a" * 1_000_000])

    asyncio.run(run())


def test_an_engine_that_was_closed_encodes_nothing_more():
    async def run():
        engine = hal.AsyncEngine(device="cpu")
        await engine._close()
        with pytest.raises(Unavailable, match="closed"):
            await engine.encode(["a"])

    asyncio.run(run())


def test_a_stopped_engine_process_is_503_until_it_goes_on(monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_SILENCE", "1")
    monkeypatch.setenv("HAL_SECONDS_BEAT", "0.1")
    with serving("--slots", "2") as served:
        os.kill(served.engine(), signal.SIGSTOP)
        served.wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, "it is taken for healthy")
        answer = ask(served)
        assert answer.status_code == 503
        assert "it is stopped, or hangs" in answer.json()["error"]["message"]
        os.kill(served.engine(), signal.SIGCONT)
        served.wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "it does not go on")
        assert ask(served).status_code == 200
