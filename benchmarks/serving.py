"""``hal serve`` against ``hal run`` and ``hal.AsyncEngine`` on the same requests, with a model of 28 M and one thread.

    python benchmarks/serving.py [--rounds N] [--guidellm BIN] [--transformers BIN]

- tokens/s: of the server's clients, and of ``hal run`` on the same prompts and lengths.
- first token: milliseconds from a request to its first token, median over all requests: of the server's clients, and of
  tasks of one event loop with an AsyncEngine. Both have the same 32 clients; each sends its next request when the one
  before has ended.
- the loop held: milliseconds of processor time of the event loop's thread in each callback, with the AsyncEngine's 32
  streams.

``--guidellm`` is that load tool's command (``pip install guidellm``): it puts the same load on the server, and on
``transformers serve`` of ``--transformers``, the command of an environment with transformers' own server
(``pip install 'transformers[serving]' torch``). Neither is needed by hal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from generation import cpu_name, write_random_model
from run import versions

import hal

CLIENTS, EACH, PROMPT = 32, 2, 64
LENGTHS = (32, 96)
HAL = [sys.executable, "-c", "from hal.cli import main; main()"]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
Turn = tuple[float, float]
"""Tokens a second, and the median of milliseconds to a first token."""
Send = Callable[[dict[str, Any]], Awaitable[float]]
"""Sends a request; returns the seconds to its first token."""


def requests() -> list[dict[str, Any]]:
    """All requests, the same each time."""
    draw = random.Random(28)
    return [
        {
            "prompt": " ".join(f"w{draw.randrange(3, 8192)}" for _ in range(PROMPT)),
            "max_tokens": (length := draw.randint(*LENGTHS)),
            "min_tokens": length,
            "temperature": 0.0,
        }
        for _ in range(CLIENTS * EACH)
    ]


def write_model(folder: Path) -> None:
    """The random model with a tokenizer of a word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_random_model(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(8192)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "pad_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


async def load(send: Send) -> tuple[float, list[float]]:
    """All clients to their ends: tokens a second, and seconds to each first token."""
    wanted = requests()

    async def client(number: int) -> list[float]:
        return [await send(wanted[number + CLIENTS * turn]) for turn in range(EACH)]

    began = time.perf_counter()
    found = await asyncio.gather(*map(client, range(CLIENTS)))
    tokens = sum(one["max_tokens"] for one in wanted)
    return tokens / (time.perf_counter() - began), [first for firsts in found for first in firsts]


def over_http(port: int) -> Send:
    """Requests to the server at a port of this host."""

    async def send(request: dict[str, Any]) -> float:
        began, first = time.perf_counter(), 0.0
        body = json.dumps(request | {"stream": True}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Content-Length: {len(body)}"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        events = 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                events += 1
        writer.close()
        assert events, "no event came"
        return first

    return send


def in_process(engine: hal.AsyncEngine) -> Send:
    """Requests to an AsyncEngine of this process."""

    async def send(request: dict[str, Any]) -> float:
        began, first = time.perf_counter(), 0.0
        params = {name: value for name, value in request.items() if name != "prompt"}
        async for _ in engine.generate(request["prompt"], params):
            first = first or time.perf_counter() - began
        return first

    return send


@contextmanager
def timed_callbacks(held: list[float]) -> Iterator[None]:
    """Inside, note the milliseconds of processor time of each callback of the event loop."""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        held.append(1000 * (time.thread_time() - began))

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


async def in_turns(model: Path, port: int, rounds: int) -> tuple[list[Turn], list[Turn]]:
    """Rounds of the load on an AsyncEngine and on the server, both of which are open all the time. Prints how long the
    AsyncEngine held the loop."""
    held: list[float] = []
    async with hal.AsyncEngine(model, "cpu", slots=CLIENTS) as engine:
        ways: list[tuple[Send, list[Turn]]] = [(in_process(engine), []), (over_http(port), [])]
        for send, _ in ways:
            await send(requests()[0])
        for number in range(rounds):
            for send, turns in ways if number % 2 else ways[::-1]:
                with timed_callbacks(held) if send is ways[0][0] else nullcontext():
                    rate, firsts = await load(send)
                turns.append((rate, 1000 * statistics.median(firsts)))
    p99 = statistics.quantiles(held, n=100)[98]
    figures = f"median {statistics.median(held):.3f} ms, p99 {p99:.3f}, most {max(held):.3f}"
    print(f"\nthe loop was held {len(held)} times: {figures}")
    return ways[0][1], ways[1][1]


@contextmanager
def serving(command: list[str]) -> Iterator[int]:
    """A server in a process of its own, at a port of this host, once it takes requests."""
    port = random.randrange(20000, 30000)
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(600):
            assert process.poll() is None, process.stderr and process.stderr.read()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.communicate()


def hal_serve(model: Path) -> list[str]:
    """The command of the server."""
    return [*HAL, "serve", "--model", str(model), "--device", "cpu", "--slots", str(CLIENTS), "--name", "model"]


def hal_run(model: Path, folder: Path) -> float:
    """Tokens a second of ``hal run`` on all requests, as it says."""
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, requests())))
    options = ["--prompts", str(file), "--model", str(model), "--device", "cpu", "--slots", str(CLIENTS), "--json"]
    done = subprocess.run([*HAL, "run", *options], capture_output=True, text=True, check=True)
    found = re.search(r"([\d,.]+) tokens/s", done.stderr)
    assert found is not None, done.stderr
    return float(found[1].replace(",", ""))


def guidellm(command: str, port: int, model: str, folder: Path) -> str:
    """A row of the table, of what the load tool measures; all requests are of one length, which both servers take."""
    rows = [{"prompt": one["prompt"]} for one in requests()]
    data, report = folder / "data.jsonl", folder / f"report-{port}.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    target = f"target=http://127.0.0.1:{port},model={model},max_tokens={sum(LENGTHS) // 2}"
    options = {
        "backend": f"kind=openai_http,request_format=/v1/completions,{target}",
        "profile": f"kind=concurrent,streams={CLIENTS}",
        "constraint": f"kind=max_requests,count={len(rows)}",
        "tokenizer": f"kind=huggingface_auto,model={folder / 'model'}",
        "data": f"kind=json_file,path={data}",
        "output": f"kind=json,path={report}",
    }
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [command, "run", "--disable-console", *given],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    tokens = metrics["output_tokens_per_second"]["successful"]["mean"]
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    count = metrics["request_totals"]["successful"]
    return f"{tokens:.0f} | {first:.0f} | {count} of {len(rows)} |"


def compare(model: Path, folder: Path, rounds: int) -> None:
    """Print the table of hal against itself."""
    with serving(hal_serve(model)) as port:
        found = dict(zip(("hal.AsyncEngine", "hal serve"), asyncio.run(in_turns(model, port, rounds)), strict=True))
        found = {"hal run": [(hal_run(model, folder), 0.0) for _ in range(rounds)], **found}
    print("\n| | tokens/s | (lowest to highest) | of hal run | first token, ms | more than AsyncEngine |")
    print("|---|---:|---|---:|---:|---:|")
    for name, turns in found.items():
        rates = [rate for rate, _ in turns]
        ratio = statistics.median(rate / own for (rate, _), (own, _) in zip(turns, found["hal run"], strict=True))
        row = f"| {name} | {statistics.median(rates):.0f} | {min(rates):.0f} to {max(rates):.0f} | {ratio:.2f} | "
        if name != "hal run":
            pairs = zip(turns, found["hal.AsyncEngine"], strict=True)
            row += f"{statistics.median(first for _, first in turns):.1f} | "
            row += f"{statistics.median(first - own for (_, first), (_, own) in pairs):+.1f} |"
        else:
            row += "| |"
        print(row, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guidellm", metavar="BIN", help="the load tool's command")
    parser.add_argument("--transformers", metavar="BIN", help="the command of an environment with transformers serve")
    chosen = parser.parse_args()
    os.environ.update(ONE_THREAD)
    print(f"{versions()}; {cpu_name()}; {CLIENTS} clients, {CLIENTS * EACH} requests of {PROMPT} tokens and {LENGTHS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        write_model(model)
        compare(model, folder, chosen.rounds)
        if not chosen.guidellm:
            return
        print("\n| guidellm on | tokens/s | first token, ms | requests |\n|---|---:|---:|---|")
        with serving(hal_serve(model)) as port:
            print(f"| hal serve | {guidellm(chosen.guidellm, port, 'model', folder)}", flush=True)
        if chosen.transformers:
            command = [chosen.transformers, "serve", str(model), "--device", "cpu", "--dtype", "float32"]
            with serving([*command, "--continuous-batching"]) as port:
                print(f"| transformers serve | {guidellm(chosen.guidellm, port, str(model), folder)}", flush=True)


if __name__ == "__main__":
    main()
