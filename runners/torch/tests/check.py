"""Checks the runner against the tokens of the cpu device (tokens.json, made by record.py), without Paddle.

    python runners/torch/tests/check.py [--device cuda|cpu] [--only STAGE,STAGE]

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
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    sys.exit(f"check.py: {error} (install a build of torch for your GPU, as pip install './runners/torch[torch]')")
from hal_core import HalError, MemorySink, Request, SamplingParams, SlotStatus, StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.stepping import RunnerSetup, Stepper, overlap_of
from hal_torch.attention import Prompts, Tokens, TorchKernels, TritonKernels, attend
from hal_torch.model import Decoder
from hal_torch.runner import TorchRunner
from requests_drawn import drawn_requests

from hal import open_device

RECORDED = Path(__file__).parent / "tokens.json"
SIZES = StateConfig(4, 128, 16, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1)
AMPLE, SCARCE = 32, 6


def recorded() -> list[tuple[Request, list[int]]]:
    """Each request with its expected tokens."""
    rows = json.loads(RECORDED.read_text())
    assert all(row["margin"] >= 1e-3 for row in rows), "margins are too narrow"
    return [(Request(row["request_id"], row["prompt"], SamplingParams(**row["params"])), row["tokens"]) for row in rows]


@contextlib.contextmanager
def opened(name: str, sizes: StateConfig = SIZES, blocks: int = AMPLE, **options: object) -> Iterator[Stepper]:
    """A stepper with a runner, on a device that is closed afterwards."""
    with open_device(name) as device:
        setup = RunnerSetup(device, sizes, blocks, DEFAULT_CHECKPOINT, dtype="float32")
        # Resolved by a thread: else save_output would wait for each step.
        sink = MemorySink(threaded=True)
        yield Stepper(device, setup.state, TorchRunner(setup, **options), sink, blocks=blocks)
        sink.close(30.0)


def generate(
    stepper: Stepper, requests: list[Request], chunk: int | None = None, **options: object
) -> tuple[dict[str, list[int]], Engine]:
    """The tokens of each request."""
    engine = Engine(stepper, Limits(chunk=chunk), **options)
    for request in requests:
        engine.submit(request)
    ended = list(engine.run())
    stepper.sink.close(30.0)
    assert not [one for one in ended if one.message], [one.message for one in ended if one.message]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for record in stepper.sink.records:
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                found[row.request_id] += row.tokens.tolist()
    return found, engine


def tokens(name: str, blocks: int = AMPLE, least_preemptions: int = 0, drafts: int = 0, **options: object) -> str:
    """All recorded requests at once."""
    engine_options = {key: options.pop(key) for key in ("chunk", "overlap") if key in options}
    wanted = recorded()
    with opened(name, replace(SIZES, max_draft_tokens=drafts), blocks, **options) as stepper:
        if engine_options.get("overlap"):
            assert overlap_of("on", stepper.device, "TorchRunner", stepper.runner.needs_host)[0]
        found, engine = generate(stepper, [request for request, _ in wanted], **engine_options)
        graphs = 0 if stepper.runner.graphs is None else len(stepper.runner.graphs)
    wrong = [request.request_id for request, given in wanted if found[request.request_id] != given]
    for request, given in wanted:
        if request.request_id in wrong:
            print("  ", request.request_id, "wanted", given, "given", found[request.request_id])
    assert not wrong, f"{len(wrong)} of {len(wanted)} requests differ: {wrong}"
    assert engine.scheduler.preemptions >= least_preemptions, engine.scheduler.preemptions
    found = f"{stepper.acceptance.accepted} of {stepper.acceptance.drafted} drafts accepted, " if drafts else ""
    assert not drafts or stepper.acceptance.accepted, found
    return f"{len(wanted)} requests equal, {found}{engine.scheduler.preemptions} preemptions, {graphs} graphs"


def attention(name: str) -> str:
    """Compare the kernels with their torch versions on drawn keys and tables: results, and the cache afterwards."""
    worst = {"float32": 0.0, "bfloat16": 0.0}
    for heads, kv_heads, width, size, dtype in (
        (4, 2, 32, 16, "float32"),
        (32, 8, 128, 16, "float32"),
        (12, 2, 80, 4, "float32"),
        (12, 2, 80, 4, "bfloat16"),
        (32, 8, 128, 16, "bfloat16"),
    ):
        made = {"device": "cuda", "dtype": getattr(torch, dtype)}
        caches = [torch.randn(152, size, kv_heads, width, **made) for _ in "kv"]
        count = 14 if width == 80 else 9
        projected = torch.randn(count, heads + 2 * kv_heads, width, **made)
        projected[count - 2, -1] = float("nan")  # a value of one token
        # Rows of other slots share no block; of two rows a slot, each sees as far as its own limit.
        table = torch.randperm(150, device="cuda").reshape(5, 30).int()
        last = torch.tensor([-1, 0, size * 30 - 1, 17, 3], device="cuda")
        if width == 80:
            last = torch.stack([last, torch.tensor([-1, 1, -1, 18, 33], device="cuda")], 1).flatten()
        prompt = torch.arange(4, device="cuda")  # of a sixth row, in blocks of the first
        positions = torch.cat([prompt, last])
        tables = torch.cat([table[:1].expand(4, -1), table.repeat_interleave(len(last) // 5, 0)])
        ends = torch.tensor([0, 1, 4, 4], dtype=torch.int32, device="cuda")
        block = tables.gather(1, positions.clamp(min=0)[:, None] // size)[:, 0].long()
        places = torch.where(positions < 0, 150, block) * size + positions.clamp(min=0) % size
        # Two pieces: the first has one token and sees itself, the second has three and sees itself and two before it.
        seen = torch.cat([places[:1], places[1:3].flip(0), places[1:4]])
        key_ends = torch.tensor([0, 1, 6, 6], dtype=torch.int32, device="cuda")
        rows = torch.tensor([[1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
        bias = torch.where(rows.cuda() == 1, 0, torch.finfo(made["dtype"]).min / 4).to(made["dtype"])
        angles = torch.rand(count, width // 2, device="cuda") * 6
        given = []
        for kernels in (TorchKernels(), TritonKernels(packs=dtype == "bfloat16")):
            mine, bad = tuple(cache.clone() for cache in caches), torch.zeros(count, dtype=torch.uint8, device="cuda")
            decoding = kernels.rows(table, last, caches[0])
            tokens = Tokens(positions, positions, places, bad, 4, Prompts(seen, (ends, key_ends), bias), decoding)
            parts = projected.split([heads, kv_heads, kv_heads], 1)
            out = attend(*parts, mine, tokens, (angles.cos(), angles.sin()), kernels)
            given.append((out, *(one[:150] for one in mine), bad))
        for one, other in zip(*given, strict=True):
            assert torch.isfinite(one.float()).all(), "NaN reached the cache"
            worst[dtype] = max(worst[dtype], float((one.float() - other.float()).abs().max()))
            assert bad.tolist() == [0] * (count - 2) + [1, 0], bad
    assert worst["float32"] < 1e-5, worst
    assert worst["bfloat16"] < 4e-2, worst
    return f"largest differences {worst}"


def shares(name: str) -> str:
    """Few slots with many keys, which several programs divide: the results of torch, also of each repetition."""
    worst, most = {"float32": 0.0, "bfloat16": 0.0}, 0
    for heads, kv_heads, width, each, slots, longest, dtype in (
        (32, 8, 64, 1, 1, 32768, "bfloat16"),
        (32, 8, 128, 1, 3, 9000, "bfloat16"),
        (4, 2, 32, 1, 128, 700, "float32"),
        (12, 2, 80, 4, 5, 4000, "float32"),
        (12, 2, 80, 4, 5, 4000, "bfloat16"),
    ):
        size, blocks = 16, -(-longest // 16)
        made = {"device": "cuda", "dtype": getattr(torch, dtype)}
        cache = tuple(torch.randn(slots * blocks + 2, size, kv_heads, width, **made) for _ in "kv")
        table = torch.randperm(slots * blocks, device="cuda").reshape(slots, blocks).int()
        ends = torch.randint(-1, longest - each, (slots,), device="cuda")
        ends[-1] = longest - each
        last = ends[:, None] + torch.arange(each, device="cuda")
        if each > 1:  # rows of one slot that end before, and behind, a share begins; a slot without rows
            last[1], last[0] = torch.tensor([254, 255, 256, 257], device="cuda"), -1
        query = torch.randn(slots * each, heads, width, **made)
        found = []
        for kernels in (TorchKernels(), TritonKernels(packs=dtype == "bfloat16")):
            rows = kernels.rows(table, last.flatten(), cache[0])
            for _ in range(1 if rows.shares is None else 50):
                out = torch.full_like(query, float("nan"))
                kernels.attend(query, cache, rows, out)
                found.append(out)
        assert rows.shares is not None
        most = max(most, int((rows.shares.work >= 0).sum()))
        assert all(torch.equal(found[1], one) for one in found[2:]), "repetitions differ"
        assert int(rows.shares.arrived.abs().sum()) == 0, "a share was counted and not joined"
        worst[dtype] = max(worst[dtype], float((found[0].float() - found[1].float()).abs().max()))
    assert most > 60, most
    assert worst["float32"] < 1e-5, worst
    assert worst["bfloat16"] < 4e-2, worst
    return f"largest differences {worst}, at most {most} shares"


def controls(name: str) -> str:
    """Every control, of drawn requests: the device's tokens and log-probabilities are those of torch's CPU, and its
    tokens those with drafts."""
    given = [drawn_rows(place, drafts) for place, drafts in ((name, 0), ("cpu", 0), (name, 3))]
    assert len(given[0]) == len(given[1]) == len(given[2])
    different = [one for one, found in given[0].items() if not found[0] == given[1][one][0] == given[2][one][0]]
    assert not different, f"{len(different)} of {len(given[0])} requests differ: {different}"
    apart = max(
        (abs(a - b) for name in given[0] for a, b in zip(given[0][name][1], given[1][name][1], strict=True)), default=0
    )
    assert apart < 1e-4, apart
    return f"{len(given[0])} requests equal, log-probabilities within {apart:.1e}"


def drawn_rows(name: str, drafts: int) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of drawn requests."""
    sizes = StateConfig(8, 96, 16, max_draft_tokens=drafts, max_logprobs=3, max_eos=2, max_stop_length=3)
    with opened(name, sizes, blocks=48) as stepper:
        engine = Engine(stepper, Limits(chunk=40), overlap=name == "cuda")
        for request in drawn_requests(24, 2000, sizes.max_model_len):
            engine.submit(request)
        list(engine.run())
        stepper.sink.close(30.0)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in stepper.sink.records:
        for row in record.rows():
            tokens, values = found.setdefault(row.request_id, ([], []))
            tokens += row.tokens.tolist()
            if row.logprobs is not None:
                values += [value for value in row.logprobs.ravel().tolist() if value > -1e30]
    return found


def useless(name: str) -> str:
    """A request whose logits are NaN ends with an error; the second one continues, and so does the next."""
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
    assert ended["bad"].token_ids == (), ended["bad"]  # the step's own record has the error
    return f"after {len(ended['bad'].token_ids)} tokens: {ended['bad'].message}"


def blocks(name: str) -> str:
    """Blocks that were written are read again, while the device is busy; a write is done when the blocks hold it."""
    with opened(name) as stepper:
        cache, generator = stepper.runner.cache, torch.Generator().manual_seed(3)
        size = (3, cache.block_bytes)
        data = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).numpy()
        kept, before = data.copy(), cache.read([0, 8])
        with stepper.runner._on(stepper.stream):
            if name == "cuda":
                torch.cuda._sleep(400_000_000)
            ticket = cache.write([4, 9, 2], data)
            data[:] = 0
            early = ticket.done()
            if name == "cuda":  # of memory that a write no longer kept
                torch.full(size, 77, dtype=torch.uint8, device=name)
        ticket.wait(10.0)
        assert early == (name != "cuda"), "a write was done before the work that was launched before it"
        assert (cache.read([9, 2, 4]) == kept[[1, 2, 0]]).all(), "other bytes were read"
        assert (cache.read([0, 8]) == before).all(), "another block was written"
    return f"3 blocks of {cache.block_bytes:,} bytes"


TEXTS = ("def main(", "for i in range(", "if __name__ ==", "from collections import")
DRAWS = (("--seed", "7", "--temperature", "0.8"), ("--temperature", "0.7", "--top-p", "0.8", "--seed", "3"))
CODE = "import sys; from hal.cli import main; sys.argv[0] = 'hal'; main()"


def run(name: str, texts: tuple[str, ...], *more: str) -> tuple[list[list[int]], str]:
    """The tokens that hal run, as a process that can import no Paddle, gives for each text, and its last line."""
    overlap = "on" if name == "cuda" else "auto"
    words = ["--device", name, "--runner", "torch", "--dtype", "float32", "--overlap", overlap, "--json", *more]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(text + "\n" for text in texts))
        (Path(folder) / "paddle.py").write_text("raise ImportError('the torch runner needs no Paddle')\n")
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        called = subprocess.run(
            [sys.executable, "-c", CODE, "run", "--temperature=0", *words,
             "--max-tokens", "24", "--prompts", str(prompts)],
            capture_output=True, text=True, timeout=180, check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )  # fmt: skip
    if called.returncode:
        print("  ", called.stdout[-600:], called.stderr[-1600:])
    assert called.returncode == 0, called.returncode
    answers = {row["prompt"]: row["token_ids"] for row in map(json.loads, called.stdout.splitlines())}
    return [answers[text] for text in texts], called.stderr.strip().splitlines()[-1]


def command(name: str) -> str:
    """hal run on one rank."""
    given, message = run(name, TEXTS[:1])
    assert given == [recorded()[0][1]], given
    return message


def ranks(name: str) -> str:
    """hal run on two ranks, on cuda two GPUs: greedy in each division, and drawn as one rank draws."""
    if name == "cuda" and torch.cuda.device_count() < 2:
        return "not here: it needs two GPUs"
    wanted = {request.request_id: tokens for request, tokens in recorded()}
    for more in (("--dp", "2"), ("--split", "1,1"), ("--tp", "2", "--drafts", "3"), ("--tp", "2")):
        given, message = run(name, TEXTS, *more)
        assert given == [wanted[f"w0s0p{number}"] for number in range(len(TEXTS))], (more, given)
    for options in DRAWS:
        given, _ = run(name, TEXTS, "--tp", "2", *options)
        alone, _ = run(name, TEXTS, *options)
        assert given == alone, (options, given, alone)
    return f"{len(TEXTS) * (4 + len(DRAWS))} requests equal; {message}"


def stages(name: str) -> dict[str, Any]:
    """Stages by name, called with the device's name."""
    made: dict[str, Any] = {}
    if name == "cuda":
        made["attention"] = attention
        made["shares"] = shares
        made["tokens, no graph, attention in torch"] = lambda n: tokens(n, captures=False, kernels=TorchKernels())
        made["tokens, no graph"] = lambda n: tokens(n, captures=False)
        made["tokens, graphs, attention in torch"] = lambda n: tokens(n, kernels=TorchKernels())
    made["tokens"] = tokens
    made["tokens, chunks of 3"] = lambda n: tokens(n, chunk=3)
    made["tokens, drafts"] = lambda n: tokens(n, drafts=3)
    made["tokens, drafts, scarce blocks"] = lambda n: tokens(n, drafts=3, blocks=SCARCE, least_preemptions=1)
    made["tokens, scarce blocks"] = lambda n: tokens(n, blocks=SCARCE, least_preemptions=1)
    if name == "cuda":
        made["tokens, overlapped, drafts"] = lambda n: tokens(n, drafts=4, overlap=True)
        made["tokens, overlapped"] = lambda n: tokens(n, overlap=True)
        made["tokens, overlapped, scarce blocks"] = lambda n: tokens(
            n, overlap=True, blocks=SCARCE, least_preemptions=1
        )
    made |= {"controls": controls, "useless": useless, "cache": blocks, "command": command, "ranks": ranks}
    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.getLogger("hal").setLevel(logging.ERROR)
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {what}", flush=True)
    try:
        open_device(options.device).close()
    except HalError as error:
        sys.exit(f"check.py: {error}; --device cpu checks on torch's CPU")
    failed = 0
    for name, stage in stages(options.device).items():
        if options.only and not any(word in name for word in options.only.split(",")):
            continue
        began = time.perf_counter()
        try:
            message = stage(options.device)
        except BaseException:  # noqa: BLE001 (the other stages are to be seen)
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok     {name}: {message} ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{failed} stages failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
