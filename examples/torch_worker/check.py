"""Checks the runner against the tokens of the cpu device (tokens.json, made by record.py), without Paddle.

    python examples/torch_worker/check.py [--device cuda] [--only STAGE,STAGE]

Every stage is one line, with its traceback where it fails; the status is the number that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hal_core import ALONE, InvalidValue, MemorySink, Request, SamplingParams, SlotStatus, StateConfig
from hal_example_torch import Decoder, TorchRunner
from hal_example_torch.attention import FusedAttention, Tokens, attend
from hal_example_torch.sampling import TRUNCATED, sample

from hal import open_device
from hal.engine import Engine
from hal.model import DEFAULT_CHECKPOINT
from hal.model.config import read_config
from hal.sampling.philox import uniform as host_uniform
from hal.sampling.rows import SamplingRows
from hal.sampling.sampler import sample as host_sample
from hal.stepping import RunnerSetup, Stepper, overlap_of

RECORDED = Path(__file__).parent / "tokens.json"
SIZES = StateConfig(4, 128, 16, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1)
AMPLE, SCARCE = 32, 6


def recorded() -> list[tuple[Request, list[int]]]:
    """Each request with the tokens that it must be given."""
    rows = json.loads(RECORDED.read_text())
    assert all(row["margin"] >= 1e-3 for row in rows), "margins are too narrow"
    return [(Request(row["request_id"], row["prompt"], SamplingParams(**row["params"])), row["tokens"]) for row in rows]


@contextlib.contextmanager
def opened(name: str, sizes: StateConfig = SIZES, blocks: int = AMPLE, **options: object) -> Iterator[Stepper]:
    """A stepper with a runner, on a device that is closed afterwards."""
    with open_device(name) as device:
        state = device.state(sizes)
        decoder = options.get("decoder")
        vocab = decoder.config.vocab_size if decoder else read_config(DEFAULT_CHECKPOINT).vocab_size
        setup = RunnerSetup(device, state, blocks, DEFAULT_CHECKPOINT, name, vocab, ALONE)
        # Resolved by a thread: else save_output would wait for each step.
        sink = MemorySink(threaded=True)
        yield Stepper(device, state, TorchRunner(setup, **options), sink, blocks=blocks)
        sink.close(30.0)


def generate(stepper: Stepper, requests: list[Request], **options: object) -> tuple[dict[str, list[int]], Engine]:
    """The tokens of each request."""
    engine = Engine(stepper, **options)
    for request in requests:
        engine.submit(request)
    ended = list(engine.run())
    stepper.sink.close(30.0)
    assert not [one for one in ended if one.message], [one.message for one in ended if one.message]
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for record in stepper.sink.records:
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                told[row.request_id] += row.tokens.tolist()
    return told, engine


def tokens(name: str, blocks: int = AMPLE, least_preemptions: int = 0, **options: object) -> str:
    """All recorded requests at once."""
    engine_options = {key: options.pop(key) for key in ("chunk", "overlap") if key in options}
    wanted = recorded()
    with opened(name, blocks=blocks, **options) as stepper:
        if engine_options.get("overlap"):
            assert overlap_of("on", stepper.device, "TorchRunner", stepper.runner.needs_host)[0]
        told, engine = generate(stepper, [request for request, _ in wanted], **engine_options)
        graphs = sorted(stepper.runner._graphs)
    wrong = [request.request_id for request, given in wanted if told[request.request_id] != given]
    for request, given in wanted:
        if request.request_id in wrong:
            print("  ", request.request_id, "wanted", given, "given", told[request.request_id])
    assert not wrong, f"{len(wrong)} of {len(wanted)} requests differ: {wrong}"
    assert engine.scheduler.preemptions >= least_preemptions, engine.scheduler.preemptions
    return f"{len(wanted)} requests equal, {engine.scheduler.preemptions} preemptions, graphs {graphs}"


def sampling(name: str) -> str:
    """Draws on the device and in NumPy, of random logits."""
    place, rng = torch.device("cuda" if name == "cuda" else "cpu"), np.random.default_rng(5)
    n, vocab = 256, 5000
    logits = (rng.standard_normal((n, vocab)) * 3).astype(np.float32)
    seed, position = rng.integers(-(2**63), 2**63 - 1, n), rng.integers(0, 2**40, n)
    columns = {"temperature": rng.choice([0, 0.3, 1, 2], n), "top_p": rng.choice([0.1, 0.5, 0.9, 1], n)}
    columns = {key: value.astype(np.float32) for key, value in columns.items()}
    rows = {**columns, "seed": seed, "step_idx": position}
    zero, lists = np.zeros(n, np.int32), np.zeros((n, 1), np.int64)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    whole = SamplingRows(
        columns["temperature"], zero, columns["top_p"], zeros, seed, position, ones, zeros, zeros,
        zero.astype(np.int64), lists, zero, lists, lists.astype(np.int32), zero, lists, zero, None, None,
    )  # fmt: skip
    wanted = host_sample(logits, whole, logprobs=None).tokens
    placed = {key: torch.from_dlpack(value).to(place) for key, value in rows.items()}
    from hal_example_torch.sampling import uniform

    drawn = uniform(placed["seed"], placed["step_idx"]).cpu().tolist()
    assert drawn == host_uniform(seed, position).tolist(), "the uniform numbers differ"
    given = sample(torch.from_dlpack(logits).to(place), TRUNCATED, placed).cpu().tolist()
    different = int((np.array(given) != wanted).sum())
    assert different == 0, f"{different} of {n} draws differ"
    broken = torch.from_dlpack(logits).to(place).clone()
    broken[0, 3], broken[1, 3], broken[2] = float("nan"), float("inf"), float("-inf")
    assert sample(broken, TRUNCATED, placed)[:3].tolist() == [-1, -1, -1]
    return f"{n} draws and as many uniform numbers equal"


def attention(name: str) -> str:
    """The kernels and the one in torch, of random keys and tables: what they give, and what they leave in the cache."""
    worst = {"float32": 0.0, "bfloat16": 0.0}
    for heads, kv_heads, width, size, dtype in (
        (4, 2, 32, 16, "float32"),
        (32, 8, 128, 16, "float32"),
        (12, 2, 80, 4, "float32"),
        (12, 2, 80, 4, "bfloat16"),
        (32, 8, 128, 16, "bfloat16"),
    ):
        made = {"device": "cuda", "dtype": getattr(torch, dtype)}
        caches = [torch.randn(151, size, kv_heads, width, **made) for _ in "kv"]
        projected = torch.randn(5, 1, heads + 2 * kv_heads, width, **made).split([heads, kv_heads, kv_heads], 2)
        table = torch.randperm(150, device="cuda").reshape(5, 30).int()  # rows share no block
        last = torch.tensor([[-1], [0], [size * 30 - 1], [17], [100]], device="cuda")
        block = torch.where(last < 0, 150, table.gather(1, last.clamp(min=0) // size).long())
        tokens = Tokens(last, last, (block * size + last.clamp(min=0) % size).flatten(), table)
        angles = torch.rand(5, 1, 1, width // 2, device="cuda") * 6
        given = []
        for way in (attend, FusedAttention()):
            mine = tuple(cache.clone() for cache in caches)
            given.append((way(*projected, mine, tokens, (angles.cos(), angles.sin())), *(one[:150] for one in mine)))
        for one, other in zip(*given, strict=True):
            worst[dtype] = max(worst[dtype], float((one.float() - other.float()).abs().max()))
    assert worst["float32"] < 1e-5, worst
    assert worst["bfloat16"] < 4e-2, worst
    return f"largest differences {worst}"


def refused(name: str) -> str:
    """Controls that the runner does not sample by, and a broken checkpoint's name."""
    with opened(name, captures=False, attention=attend) as stepper:
        given = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": 0.1}
        given |= {"presence_penalty": 0.1, "min_tokens": 2, "bad_words": (5,), "logprobs": 0}
        named = []
        for key, value in given.items():
            try:
                stepper.runner.check(Request("r", [5], SamplingParams(**{key: value})))
            except InvalidValue as error:
                named.append(error.argument)
        assert named == list(given), named
    return f"{len(given)} controls"


def useless(name: str) -> str:
    """A request whose logits are NaN ends with an error; the other one goes on, and so does who comes next."""
    decoder = Decoder.load(DEFAULT_CHECKPOINT, "cuda" if name == "cuda" else "cpu")
    decoder.tensors["model.embed_tokens.weight"] = decoder.tensors["model.embed_tokens.weight"].clone()
    decoder.tensors["model.embed_tokens.weight"][1999] = float("nan")  # the head is another tensor now
    (request, given), *_ = recorded()
    with opened(name, decoder=decoder) as stepper:
        engine = Engine(stepper, overlap=name == "cuda")
        for one in (Request("bad", [1999, 5], SamplingParams(max_tokens=12)), request):
            engine.submit(one)
        ended = {one.request_id: one for one in engine.run()}
        engine.submit(Request("later", request.prompt, request.params))
        ended |= {one.request_id: one for one in engine.run()}
    assert "NaN" in ended["bad"].message, ended["bad"]
    assert list(ended[request.request_id].token_ids) == given, ended[request.request_id]
    assert list(ended["later"].token_ids) == given, ended["later"]
    assert ended["bad"].token_ids == (), ended["bad"]  # told by the step's own record
    return f"after {len(ended['bad'].token_ids)} tokens: {ended['bad'].message}"


TEXTS = ("def main(", "for i in range(", "if __name__ ==", "from collections import")
DRAWS = (("--seed", "7", "--temperature", "0.8"), ("--temperature", "0.7", "--top-p", "0.8", "--seed", "3"))
CODE = "import sys; from hal.cli import main; sys.argv[0] = 'hal'; main()"


def run(name: str, texts: tuple[str, ...], *more: str) -> tuple[list[list[int]], str]:
    """The tokens that hal run, as a process, gives for each text, and its last line."""
    overlap = "on" if name == "cuda" else "auto"
    words = ["--device", name, "--runner", "hal_example_torch:TorchRunner", "--overlap", overlap, "--json", *more]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(text + "\n" for text in texts))
        called = subprocess.run(
            [sys.executable, "-c", CODE, "run", *words, "--max-tokens", "24", "--prompts", str(prompts)],
            capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "XDG_RUNTIME_DIR": folder},
        )  # fmt: skip
    if called.returncode:
        print("  ", called.stdout[-600:], called.stderr[-1600:])
    assert called.returncode == 0, called.returncode
    answers = {row["prompt"]: row["token_ids"] for row in map(json.loads, called.stdout.splitlines())}
    return [answers[text] for text in texts], called.stderr.strip().splitlines()[-1]


def command(name: str) -> str:
    """hal run on one rank."""
    given, said = run(name, TEXTS[:1])
    assert given == [recorded()[0][1]], given
    return said


def ranks(name: str) -> str:
    """hal run on two ranks, which need Paddle, and on cuda two GPUs: greedy, and drawn as one rank draws."""
    if find_spec("paddle") is None or (name == "cuda" and torch.cuda.device_count() < 2):
        return "not here: it needs Paddle, and two GPUs where it runs on them"
    wanted = {request.request_id: tokens for request, tokens in recorded()}
    given, said = run(name, TEXTS, "--tp", "2")
    assert given == [wanted[f"w0s0p{number}"] for number in range(len(TEXTS))], given
    for options in DRAWS:
        given, _ = run(name, TEXTS, "--tp", "2", *options)
        alone, _ = run(name, TEXTS, *options)
        assert given == alone, (options, given, alone)
    return f"{len(TEXTS) * (1 + len(DRAWS))} requests equal; {said}"


def stages(name: str) -> dict[str, Any]:
    """By name, what is called with the device's name."""
    made: dict[str, Any] = {"sampling": sampling}
    if name == "cuda":
        made["attention"] = attention
        made["tokens, no graph, attention in torch"] = lambda n: tokens(n, captures=False, attention=attend)
        made["tokens, no graph"] = lambda n: tokens(n, captures=False)
        made["tokens, graphs, attention in torch"] = lambda n: tokens(n, attention=attend)
    made["tokens"] = tokens
    made["tokens, chunks of 3"] = lambda n: tokens(n, chunk=3)
    made["tokens, scarce blocks"] = lambda n: tokens(n, blocks=SCARCE, least_preemptions=1)
    if name == "cuda":
        made["tokens, overlapped"] = lambda n: tokens(n, overlap=True)
        made["tokens, overlapped, scarce blocks"] = lambda n: tokens(
            n, overlap=True, blocks=SCARCE, least_preemptions=1
        )
    made |= {"refused": refused, "useless": useless, "command": command, "ranks": ranks}
    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.getLogger("hal").setLevel(logging.ERROR)
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, NumPy {np.__version__}, {what}", flush=True)
    failed = 0
    for name, stage in stages(options.device).items():
        if options.only and not any(word in name for word in options.only.split(",")):
            continue
        began = time.perf_counter()
        try:
            said = stage(options.device)
        except BaseException:  # noqa: BLE001 (the other stages are to be seen)
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok     {name}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{failed} stages failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
