"""What room for drafts costs a decoding step of the torch runner, on shapes of 8 billion parameters, random weights.

    python -m benchmarks.gpu.drafts [--layers 32] [--out FILE]

A step's layers, choice of tokens and drafts as one captured graph, replayed; greedy, at 1,024 tokens a slot, all drafts
fed. A step with K drafts has to give as many times the tokens as it takes longer, to be worth it. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hal_core import ALONE, StateConfig
from hal_torch.model import Decoder
from hal_torch.plan import NOTHING
from hal_torch.runner import TorchRunner
from hal_torch.sampling import Want
from hal_torch.steps import Draft, Layers, Part

from benchmarks.gpu.torch_runner import EIGHT_B
from hal import open_device
from hal.model.config import parse_config
from hal.stepping import RunnerSetup

LENGTH, KNOWN, ROUNDS = 2048, 1024, 15
SLOTS, DRAFTS = (1, 32, 128), (0, 1, 3, 5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    config = parse_config(EIGHT_B | {"num_hidden_layers": options.layers})
    torch.cuda.set_stream(torch.cuda.Stream())
    decoder, told = Decoder.random(config, "cuda", torch.bfloat16), []
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for slots in SLOTS:
        times = [step_ms(decoder, slots, drafts) for drafts in DRAFTS]
        for drafts, (step, alone) in zip(DRAFTS, times, strict=True):
            told.append({"slots": slots, "drafts": drafts, "ms": step, "drafting_ms": alone})
            over = step / times[0][0]
            print(f"{slots} slots, {drafts} drafts: {step:.2f} ms, {over:.2f} times; drafting {alone:.3f}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(told, indent=1))


def step_ms(decoder: Decoder, slots: int, drafts: int) -> tuple[float, float]:
    """A step, and its drafting alone, in ms."""
    sizes = StateConfig(slots, LENGTH, 16, drafts, 0, max_eos=1, max_stop_sequences=1, max_bad_words=1)
    with open_device("cuda") as device:
        state, blocks = device.state(sizes), slots * sizes.max_blocks
        setup = RunnerSetup(device, state, blocks, Path(), "", decoder.config.vocab_size, ALONE)
        runner = TorchRunner(setup, decoder=decoder, captures=False)
        fields = {name: state.tensor(name, "torch") for name in state.layout.fields}
        fields["block_tables"].copy_(torch.arange(blocks, device="cuda").view(slots, -1))
        fields["token_ids"].copy_(torch.randint(0, 1000, fields["token_ids"].shape, device="cuda"))
        fields["prompt_lens"].fill_(KNOWN)
        fields["stop_flags"].zero_()
        fields["blocks_num"].fill_(sizes.max_blocks)
        fields["max_dec_len"].fill_(LENGTH)
        fields["seq_lens_decoder"].fill_(KNOWN - 1)
        fields["seq_lens_this_time"].fill_(1 + drafts)
        fields["draft_num"].fill_(drafts)
        fields["draft_tokens"].fill_(7)
        fields["next_tokens"].fill_(5)
        for cache in (*decoder.keys, *decoder.values):
            cache[:-1].normal_()
        parts: list[Part] = [Layers(NOTHING, decodes=True), Want()]
        step = timed(runner, parts + [Draft()] * bool(drafts))
        alone = timed(runner, [Draft()]) if drafts else 0.0
        torch.cuda.synchronize()
    decoder.keys.clear()
    decoder.values.clear()
    return step, alone


def timed(runner: TorchRunner, parts: list[Part]) -> float:
    """The median of a graph of these parts, in ms."""
    steps, graph = runner._steps, torch.cuda.CUDAGraph()
    with torch.no_grad():
        for part in parts:
            steps.run(part)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for part in parts:
                steps.run(part)
    events: list[tuple[Any, Any]] = []
    for _ in range(ROUNDS):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        graph.replay()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in events)


if __name__ == "__main__":
    main()
