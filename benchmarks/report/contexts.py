"""Long prompts: a token behind so many keys, a prompt's first token against transformers' forward, and many long
prompts against the same matrix products and attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from hal_engine.model.config import parse_config
from hal_torch.model import Decoder

from .loops import LoadRequest, by_hal
from .node import SHAPES, Node, opened

SHORT, CONTEXTS, ANSWERED = 128, (2048, 8192, 32768), 96
MANY, EACH = 32, 7000
"""Prompts of the larger model, and tokens of each."""
BYTES = 2
"""Of a number in bfloat16."""


def measure(*, tiny: bool = False, chunks: Sequence[int] = ()) -> dict[str, Any]:
    """Times in ms. ``chunks``: prompt tokens of a step; by default what the runner prefers."""
    contexts, answered = ((64, 128), 8) if tiny else (CONTEXTS, ANSWERED)
    found: dict[str, Any] = {"shape": "tiny" if tiny else "1B", "rows": []}
    decoder = _decoder("tiny" if tiny else "1B", contexts[-1])
    found["bandwidth"] = _bandwidth(decoder.device)
    found["forward"] = _forward(decoder, contexts[-1])
    with opened(decoder, 4, contexts[-1] + 2 * answered) as node:
        for chunk in chunks or (node.chunk,):
            turned = replace(node, chunk=chunk)
            _served(turned, 16, 4)  # what the first run loads and compiles
            base = min(_served(turned, SHORT if not tiny else 16, answered)[1] for _ in range(2))
            for context in contexts:
                first, between = _served(turned, context, answered)
                bytes_ = 2 * BYTES * context * len(decoder.keys) * decoder.keys[0][0, 0].numel()
                floor = base + bytes_ / found["bandwidth"] * 1e3
                row = {"context": context, "chunk": chunk, "first": first, "between": between, "floor": floor}
                found["rows"].append(row | {"base": base})
    del node, decoder
    torch.cuda.empty_cache() if torch.cuda.is_available() else None
    found["many"] = _many("tiny" if tiny else "8B", *((4, 40) if tiny else (MANY, EACH)), chunks)
    return found


def _decoder(shape: str, longest: int) -> Decoder:
    made = parse_config(SHAPES[shape] | {"max_position_embeddings": 2 * longest})
    on_gpu = torch.cuda.is_available()
    return Decoder.random(made, "cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32)


def _served(node: Node, context: int, answered: int) -> tuple[float, float]:
    """Of a request alone: milliseconds to its first token, and between later ones."""
    prompt = np.random.default_rng(context).integers(8, 400, context).astype(np.int32)
    run = by_hal(node, [LoadRequest("r", prompt, answered)], lambda run: False)
    times = [at for at, names in run.taken if len(names)]
    steps = np.diff(times)[answered // 4 :]
    return 1e3 * times[0], 1e3 * float(median(steps))


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (_elapsed(lambda: target.copy_(source), 5, device) / 1e3)


def _elapsed(work: Any, rounds: int, device: torch.device) -> float:  # noqa: ANN401 (a callable)
    """Median milliseconds, by events on a GPU."""
    import time

    found = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            before = time.perf_counter()
            work()
            found.append(1e3 * (time.perf_counter() - before))
    return float(median(found[1:]))


def _forward(decoder: Decoder, context: int) -> float | None:
    """Transformers' forward of one prompt of the same shape, SDPA, logits of the last token; None without it."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    config = decoder.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {name: getattr(config, name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    made = LlamaConfig(**fields, tie_word_embeddings=True, attn_implementation="sdpa", dtype=decoder.dtype)
    with torch.device(decoder.device), torch.no_grad():
        model = LlamaForCausalLM(made).to(decoder.dtype)
        ids = torch.randint(8, 400, (1, context))
        return _elapsed(lambda: model(ids, logits_to_keep=1, use_cache=True), 3, decoder.device)


def _many(shape: str, count: int, length: int, chunks: Sequence[int]) -> dict[str, Any]:
    """Milliseconds until the last of some long prompts has its first token, and of products and attention alone."""
    decoder = _decoder(shape, length + 16)
    prompts = np.random.default_rng(7).integers(8, 400, (count, length)).astype(np.int32)
    found: dict[str, Any] = {"shape": shape, "count": count, "length": length, "bare": None, "last": {}}
    if decoder.device.type == "cuda":
        from benchmarks.gpu.torch_runner import bare_graph

        graph = bare_graph(decoder, (length,))
        found["bare"] = _elapsed(lambda: [graph.replay() for _ in range(count)], 1, decoder.device)
        del graph
        torch.cuda.empty_cache()
    with opened(decoder, count, length + 16) as node:
        _served(node, 16, 4)
        for chunk in chunks or (node.chunk,):
            load = [LoadRequest(f"r{number}", row, 1) for number, row in enumerate(prompts)]
            run = by_hal(replace(node, chunk=chunk), load, lambda run: False)
            given = [at for at, names in run.taken if len(names)]
            found["last"][str(chunk)] = 1e3 * given[-1]
    return found
