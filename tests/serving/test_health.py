"""`/health` and the command's end if an engine cannot start, and if ranks are lost."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from hal_core import Unavailable
from hal_engine.generation.plan import ModelPlan
from hal_engine.serving import Drain, Settings
from hal_engine.serving.app import Server

import hal
from tests.generation.test_generate import descendants

from .conftest import COMMAND, HANGS, serving


@pytest.mark.parametrize(
    ("opened", "error", "lost", "status", "says"),
    [
        (False, None, "", 503, "loading"),
        (True, None, "", 200, "ok"),
        (True, None, "decode worker 0 was lost: rank 1", 503, "decode worker 0 was lost: rank 1"),
        (True, Unavailable("the engine process ended"), "", 503, "the engine process ended"),
    ],
)
def test_health_says_whether_the_engine_can_serve(opened, error, lost, status, says):
    async def ask():
        engine = SimpleNamespace(plan=ModelPlan(None), error=error, lost=lost)
        server = Server(engine, Settings(model="x"), drain=Drain(1.0))
        if opened:
            server._opened.set()
        return await server.health(None)

    answer = asyncio.run(ask())
    assert (answer.status_code, json.loads(answer.body)) == (status, {"status": says})


@pytest.mark.parametrize("options", [("--device", "nope"), ("--drafts", "3")], ids=lambda given: given[0])
def test_a_server_whose_engine_cannot_start_ends_and_names_the_option(options):
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == 2
    assert f"hal: error: {options[0]}: " in ended.stderr
    assert "Traceback" not in ended.stderr


def ranks_of(engine):
    """Process ids of the ranks under an engine process, by the url of their worker's engine."""
    found = {}
    for process in descendants(engine):
        with open(f"/proc/{process}/environ", "rb") as file:
            environment = file.read().decode(errors="replace")
        if re.search(r"PADDLE_TRAINER_ID=", environment):
            found.setdefault(re.search(r"HAL_RANKS_URL=([^\0]*)", environment)[1], []).append(process)
    return found


@pytest.mark.conform
def test_health_names_a_lost_rank_until_it_runs_again_and_streams_go_on():
    prompts = [f"def f{number}(" for number in range(6)]
    params = {"max_tokens": 200, "temperature": 0}

    async def stream(client, prompt, begun):
        text = ""
        async with client.stream(
            "POST", "/v1/completions", json={"prompt": prompt, "stream": True, **params}
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    begun.set()
        return text

    async def lose_a_rank(served):
        async with httpx.AsyncClient(base_url=served.url, timeout=HANGS) as client:
            begun = [asyncio.Event() for _ in prompts]
            streams = [asyncio.create_task(stream(client, *one)) for one in zip(prompts, begun, strict=True)]
            await asyncio.gather(*(one.wait() for one in begun))
            os.kill(list(ranks_of(served.engine()).values())[-1][-1], signal.SIGKILL)
            health = []
            while not health or health[-1][0] == 200:
                answer = await client.get("/health")
                health.append((answer.status_code, answer.json()["status"]))
            while health[-1][0] != 200:
                answer = await client.get("/health")
                health.append((answer.status_code, answer.json()["status"]))
            return await asyncio.gather(*streams), health

    with serving("--slots", "4", "--split", "1,2", "--restart", "1") as served:
        texts, health = asyncio.run(lose_a_rank(served))
    assert texts == [hal.generate(prompt, device="cpu", **params) for prompt in prompts]
    down = {says for status, says in health if status == 503}
    assert any(re.search(r"decode worker \d was lost: rank \d+ .*; it is started again", says) for says in down), down
    assert health[-1] == (200, "ok")
