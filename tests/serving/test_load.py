"""A server under many clients, and after many requests."""

import asyncio
from pathlib import Path

import httpx
import pytest

from .conftest import HANGS, serving

pytestmark = pytest.mark.conform
CLIENTS, FEW, MANY = 200, 2_000, 10_000


async def stream(client, number, *, leaves):
    """Read a stream to its end, or leave after its first event; return its last line."""
    body = {"prompt": f"def f{number}(", "max_tokens": 100, "stream": True, "seed": number}
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line and leaves:
                return ""
            last = line or last
    return last


def test_half_of_two_hundred_clients_leave_and_the_others_get_all():
    async def everybody(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=HANGS, limits=limits) as client:
            jobs = [stream(client, number, leaves=number % 2 == 1) for number in range(CLIENTS)]
            return await asyncio.gather(*jobs)

    with serving("--slots", "16") as served:
        found = asyncio.run(everybody(served.url))
        assert found == ["data: [DONE]", ""] * (CLIENTS // 2)
        idle = lambda: served.metric("num_requests_running") + served.metric("num_requests_waiting") == 0  # noqa: E731
        served.wait_until(idle, "requests of clients that had left still run")
        text = httpx.get(f"{served.url}/metrics").text
        ends = {reason: served.ended(text, reason) for reason in ("abort", "length", "stop", "error")}
        assert ends["error"] == 0
        assert 0 < ends["abort"] <= CLIENTS / 2 <= ends["length"] + ends["stop"]


def resident(pid):
    """Megabytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def test_memory_does_not_grow_with_requests():
    async def requests(url, count):
        async with httpx.AsyncClient(base_url=url, timeout=HANGS) as client:
            gate = asyncio.Semaphore(32)

            async def ask(number):
                async with gate:
                    answer = await client.post(
                        "/v1/completions", json={"prompt": [5, 6, 7 + number % 9], "max_tokens": 2}
                    )
                    assert answer.status_code == 200

            await asyncio.gather(*map(ask, range(count)))

    with serving("--slots", "32") as served:
        asyncio.run(requests(served.url, FEW))
        before = resident(served.process.pid), resident(served.engine())
        asyncio.run(requests(served.url, MANY - FEW))
        after = resident(served.process.pid), resident(served.engine())
        grown = [now - then for now, then in zip(after, before, strict=True)]
        print(f"grown by {grown[0]:.1f} MB (server), {grown[1]:.1f} MB (engine)")
        assert sum(grown) < 10, grown
