"""The torch runner's prefill, decoding and loading, on shapes of 8 billion parameters with random weights.

    python -m benchmarks.gpu.torch_runner [--layers 32] [--out FILE] [--only prefill,loading]

Prefill: a step's graph of layers and its choice of tokens, beside a graph of the same matrix products and attention
alone (SDPA, causal), captured in the same process and replayed in turn. Loading: a checkpoint is written and loaded in
a process of its own, whose anonymous memory is counted. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hal_core import StateConfig
from hal_engine.model.config import LlamaConfig, parse_config
from hal_engine.stepping import RunnerSetup
from hal_torch.loading import allocate
from hal_torch.model import Decoder
from hal_torch.plan import NOTHING, Piece, size_of
from hal_torch.runner import TorchRunner
from hal_torch.sampling import Want
from hal_torch.steps import Layers
from safetensors.torch import save_file
from torch.nn import functional

from benchmarks.report.node import SHAPES, device_of

SLOTS, LENGTH = 32, 2048
PROMPTS = ((128,), (1024,), (128,) * 8, (512, 512), (33,) * 20)
ROUNDS = 20
COUNTED = """
import json, sys, threading, time
from pathlib import Path
import torch
from hal_engine.model.config import read_config
from hal_torch.loading import load

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

directory, device, over = Path(sys.argv[1]), torch.device("cuda", 0), threading.Event()
torch.isfinite(torch.ones(8, dtype=torch.bfloat16, device=device)).all().item()
before, peaks = anonymous(), []
def watch():
    while not over.wait(0.002):
        peaks.append(anonymous())
thread = threading.Thread(target=watch)
thread.start()
seconds = []
for _ in range(2):
    began = time.perf_counter()
    weights = load(directory, read_config(directory), device, torch.bfloat16)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    del weights
over.set()
thread.join()
print(json.dumps({"seconds": seconds, "weights": nbytes, "host_peak": max(peaks) - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", default="")
    parser.add_argument("--only", default="prefill,loading")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    results: dict[str, Any] = {}
    if "prefill" in options.only:
        results |= steps(parse_config(SHAPES["8B"] | {"num_hidden_layers": options.layers}))
    if "loading" in options.only:
        results["loading"] = loading(min(8, options.layers))
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


def steps(config: LlamaConfig) -> dict[str, Any]:
    """Times of steps of a runner, in ms."""
    torch.cuda.set_stream(torch.cuda.Stream())
    sizes = StateConfig(SLOTS, LENGTH, 16, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_bad_words=1)
    decoder, found = Decoder.random(config, "cuda", torch.bfloat16), {}
    with device_of() as device:
        blocks = SLOTS * sizes.max_blocks
        setup = RunnerSetup(device, sizes, blocks, Path())
        state = setup.state
        began = time.perf_counter()
        runner = TorchRunner(setup, decoder=decoder)
        assert runner.graphs is not None
        found["capture_s"] = time.perf_counter() - began
        print(f"{len(runner.graphs)} graphs captured in {found['capture_s']:.1f} s", flush=True)
        fields = {name: state.tensor(name, "torch") for name in state.layout.fields}
        fields["block_tables"].copy_(torch.arange(blocks, device="cuda").view(SLOTS, -1))
        fields["token_ids"].copy_(torch.randint(0, config.vocab_size, fields["token_ids"].shape, device="cuda"))
        fields["stop_flags"].zero_()
        fields["seq_lens_decoder"].fill_(1023)
        fields["seq_lens_this_time"].fill_(1)
        fields["next_tokens"].fill_(5)
        for cache in (*decoder.keys, *decoder.values):
            cache[:-1].normal_()
        found["rows"] = [prompts(runner, decoder, lengths, fields) for lengths in PROMPTS]
        decode = timed({"decode": lambda: replay(runner, Layers(NOTHING, True), Want())})
        print(f"decoding {SLOTS} slots at 1,024 tokens: {decode['decode']:.2f} ms", flush=True)
        found |= decode
        profile(runner)
        torch.cuda.synchronize()
    return found


def planned(runner: TorchRunner, lengths: tuple[int, ...]) -> Any:  # noqa: ANN401 (a size)
    """Put the plan of prompts of these lengths where the graphs read it; its size."""
    assert runner.graphs is not None
    pieces = [Piece(slot, 0, length, True) for slot, length in enumerate(lengths)]
    replay(runner, runner._steps.plan(pieces, 0))
    return size_of(pieces, runner.graphs.sizes)


def replay(runner: TorchRunner, *parts: Any) -> None:  # noqa: ANN401 (parts of a step)
    """Launch parts that were captured."""
    assert runner.graphs is not None
    assert runner.graphs.launch(parts, runner.graphs._bound.default_stream), parts


def prompts(runner: TorchRunner, decoder: Decoder, lengths: tuple[int, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """A step of prompts alone, and beside decoding slots, against the products and attention alone."""
    fields["stop_flags"].zero_()
    size = planned(runner, lengths)
    bare, tokens = bare_graph(decoder, lengths), sum(lengths)

    def step(*, decodes: bool) -> None:
        replay(runner, Layers(size, decodes), Want())

    ways: dict[str, Callable[[], object]] = {
        "bare": bare.replay,
        "step": lambda: step(decodes=False),
        "mixed": lambda: step(decodes=True),
    }
    found: dict[str, Any] = {"prompts": f"{len(lengths)} x {lengths[0]}", "size": [size.tokens, size.keys]}
    found |= timed(ways)
    found["ratio"] = found["step"] / found["bare"]
    rate = 2 * sum(t.numel() for t in decoder.tensors.values()) * tokens / found["bare"] / 1e9
    print(
        f"{found['prompts']:>9} in {size.tokens} x {size.keys}: products and attention {found['bare']:.2f} ms "
        f"({rate:.0f} TFLOP/s), step {found['step']:.2f} ms, {found['ratio']:.3f} times; beside {SLOTS} decoding "
        f"{found['mixed']:.2f} ms",
        flush=True,
    )
    return found


def bare_graph(decoder: Decoder, lengths: tuple[int, ...]) -> Any:  # noqa: ANN401 (a graph)
    """The matrix products of packed prompts, the attention of each prompt, and one product with the head, captured."""
    config, tensors, count = decoder.config, decoder.tensors, sum(lengths)
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x, inner = torch.randn(count, config.hidden_size, **made), torch.randn(count, config.intermediate_size, **made)

    def work() -> None:
        for number in range(config.num_hidden_layers):
            layer = f"model.layers.{number}."
            qkv = functional.linear(x, tensors[layer + "self_attn.qkv.weight"]).unflatten(-1, (-1, width))
            query, key, value = qkv.transpose(0, 1)[None].split([heads, kv_heads, kv_heads], 1)
            begin = 0
            for length in lengths:
                part = slice(begin, begin + length)
                out = functional.scaled_dot_product_attention(
                    query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, enable_gqa=True
                )
                begin += length
            mixed = out if len(lengths) == 1 else query
            functional.linear(mixed[0].transpose(0, 1).flatten(1), tensors[layer + "self_attn.o_proj.weight"])
            functional.linear(x, tensors[layer + "mlp.gate_up.weight"])
            functional.linear(inner, tensors[layer + "mlp.down_proj.weight"])
        functional.linear(x[: len(lengths)], tensors["lm_head.weight"])

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            work()
    return graph


def timed(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each way in ms, by events, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 3):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            way()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: median(found) for name, found in times.items()}


def profile(runner: TorchRunner) -> None:
    """Kernels of a step of prompts by the time that they take."""
    for lengths in ((128,), (1024,)):
        size = planned(runner, lengths)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            replay(runner, Layers(size, False), Want())
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
        print(f"kernels of {lengths[0]} tokens, ms, calls:", flush=True)
        for event in events[:16]:
            print(f"  {event.self_device_time_total / 1000:8.3f} {event.count:5d}  {event.key[:90]}", flush=True)


def loading(layers: int) -> dict[str, Any]:
    """Write a checkpoint of so many layers in four files, and load it in another process."""
    fields = SHAPES["8B"] | {"num_hidden_layers": layers, "model_type": "llama", "tie_word_embeddings": False}
    config = parse_config(fields)
    with tempfile.TemporaryDirectory() as folder:
        directory, places = Path(folder), allocate(config, torch.device("cuda"), torch.bfloat16).places
        (directory / "config.json").write_text(json.dumps(fields))
        names, weight_map = sorted(places), {}
        for number in range(4):
            part = {name: places[name].normal_(0, 0.02).cpu().contiguous() for name in names[number::4]}
            file = f"model-{number + 1:05}-of-00004.safetensors"
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        del places
        torch.cuda.empty_cache()
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        largest = max(path.stat().st_size for path in directory.glob("*.safetensors"))
        done = subprocess.run([sys.executable, "-c", COUNTED, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(done.stdout) | {"largest_file": largest}
    seconds = " and ".join(f"{one:.2f}" for one in found["seconds"])
    print(
        f"loading {found['weights'] / 1e9:.2f} GB from 4 files: {seconds} s (again); anonymous host memory at most "
        f"{found['host_peak'] / 2**20:.0f} MiB above what it was, the largest file {largest / 2**20:.0f} MiB",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
