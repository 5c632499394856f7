"""The same requests through ``hal run``, AsyncEngine and ``hal serve``, each over the torch runner with random weights.

The server's clients are raw sockets of some processes; each, as each of AsyncEngine's tasks, takes the next request
when its last answer has ended, so that all end together. Nothing has to be installed of hal: the commands find its
parts by metadata that is written here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hal_torch.runner import TorchRunner

import hal

from .clients import Times, by_processes
from .node import LONGEST, SHAPES, decoder_of

CASES = (("1B", 32, 16), ("1B", 128, 8), ("8B", 128, 4))
"""Shape, clients and slots, and requests of each client."""
PROMPT, ANSWERS = 128, (64, 192)
"""Tokens of a prompt, and of answers, uniformly drawn."""
ROOT = Path(__file__).parents[2]
HAL = [sys.executable, "-c", "from hal.cli import main; main()"]
RUNNER = f"{__name__}:RandomRunner"
SHAPE = "HAL_REPORT_SHAPE"
"""Variable with the name of the shape, for the processes that make a runner."""


class RandomRunner(TorchRunner):
    """The torch runner without a checkpoint."""

    def __init__(self, setup: Any) -> None:  # noqa: ANN401 (a RunnerSetup)
        super().__init__(setup, decoder=decoder_of(os.environ[SHAPE]))


def write_model(folder: Path, shape: str) -> None:
    """A configuration, and a tokenizer of a word for each id, which a byte-level decoder joins as those of Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    words = {f"w{token}": token for token in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_metadata(folder: Path) -> None:
    """Metadata of hal's distributions that are on the path and not installed."""
    for file in (ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        try:
            version(project["name"])
        except PackageNotFoundError:
            if file.parent == ROOT or str(file.parent / "src") in {*map(os.path.abspath, sys.path)}:
                info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
                info.mkdir(parents=True)
                head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
                needs = [f"Requires-Dist: {one}\n" for one in project.get("dependencies", ())]
                (info / "METADATA").write_text(head + "".join(needs))
                lines = list[str]()
                for name, entries in project.get("entry-points", {}).items():
                    lines += [f"[{name}]", *(f"{entry} = {place}" for entry, place in entries.items())]
                (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def options_of(model: Path, device: str, clients: int) -> list[str]:
    """Options of both commands."""
    given = ["--model", str(model), "--device", device, "--runner", RUNNER]
    return [*given, "--slots", str(clients), "--max-model-len", str(LONGEST)]


def requests(clients: int, each: int, vocabulary: int) -> list[dict[str, Any]]:
    """All requests, the same each time."""
    draw = np.random.default_rng(46)
    prompts = draw.integers(8, vocabulary, (clients * each, PROMPT)).tolist()
    lengths = draw.integers(ANSWERS[0], ANSWERS[1] + 1, clients * each).tolist()
    return [
        {"prompt": prompt, "max_tokens": length, "min_tokens": length, "temperature": 0.0}
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


async def by_engine(model: Path, device: str, clients: int, load: list[dict[str, Any]]) -> dict[str, float]:
    """Tasks with an AsyncEngine."""
    async with hal.AsyncEngine(model, device, runner=RUNNER, slots=clients, max_model_len=LONGEST) as engine:
        times = Times()

        async def client(left: deque[dict[str, Any]]) -> None:
            while left:
                request = left.popleft()
                params = {name: value for name, value in request.items() if name != "prompt"}
                sent, last = time.perf_counter(), 0.0
                async for part in engine.generate(request["prompt"], params):
                    last = times.note(sent, last)
                    times.tokens += len(part.token_ids)

        await client(deque(load[:1]))
        times, left = Times(), deque(load)
        await asyncio.gather(*(client(left) for _ in range(clients)))
        return times.summary()


@contextmanager
def serving(model: Path, device: str, clients: int) -> Iterator[int]:
    """``hal serve`` at a port of this host, once it takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*HAL, "serve", *options_of(model, device, clients), "--port", str(port)])
    try:
        for _ in range(1200):
            assert process.poll() is None, "hal serve has ended"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def by_run(model: Path, device: str, clients: int, load: list[dict[str, Any]]) -> float:
    """Tokens a second of ``hal run``, as it says."""
    file = model / "prompts.jsonl"
    lines = [json.dumps(one | {"prompt": " ".join(f"w{token}" for token in one["prompt"])}) for one in load]
    file.write_text("\n".join(lines))
    command = [*HAL, "run", *options_of(model, device, clients), "--prompts", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"([\d,.]+) tokens/s", done.stderr)
    assert found is not None, done.stderr[-2000:]
    return float(found[1].replace(",", ""))


def measure(cases: Any = CASES) -> dict[str, Any]:  # noqa: ANN401 (as CASES)
    """Each case once, in the order of the columns."""
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_metadata(folder / "metadata")
        sys.path[:] = [os.path.abspath(one) for one in sys.path] + [str(folder / "metadata")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        for shape, clients, each in cases:
            model, load = folder / shape, requests(clients, each, SHAPES[shape]["vocab_size"])
            os.environ[SHAPE] = shape
            write_model(model, shape)
            row: dict[str, Any] = {"shape": shape, "clients": clients, "requests": len(load)}
            row["run"] = by_run(model, device, clients, load)
            row["engine"] = asyncio.run(by_engine(model, device, clients, load))
            with serving(model, device, clients) as port:
                by_processes(port, 1, load[:1])
                row["serve"] = by_processes(port, clients, load)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return {"prompt": PROMPT, "answers": ANSWERS, "rows": rows}
