"""Processor time of what one step applies: vLLM's own buffers against those over hal, a step of each in turn.

    python adapters/vllm/proof/applies.py [--device NAME] [--rounds N]

Needs vLLM. Own row writes are made by hal's ``_apply_write_kernel``, where Triton would launch its own, so that neither
side counts a launch. Prints microseconds, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from importlib import import_module
from typing import Any

os.environ.update(HAL_VLLM="off", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
CASES = ((0, 0), (0, 1), (0, 8), (1, 2), (8, 2), (32, 8), (128, 8))
"""New requests, and blocks appended to others."""
TOKENS, BLOCKS = list(range(120)), list(range(8))
SIZES = {"rows": 256, "length": 4096, "groups": 1, "drafts": 0, "tokens": 2048}


def step(side: Any, new: int, appended: int, number: int) -> float:  # noqa: ANN401 (hal_vllm.sides.Slots)
    """Make one step, and return the microseconds of its applies."""
    params = import_module("vllm.sampling_params").SamplingParams(temperature=0, max_tokens=8, seed=1)
    names = [f"{number}/{one}" for one in range(new)]
    drawn = {"prompt": 120, "tokens": TOKENS, "done": 0, "blocks": (BLOCKS,), "params": params}
    for name in names:
        side.add(name, drawn)
    for row in range(appended):
        side.tables.append_block_ids(row, ([7],), overwrite=False)
    began = time.process_time_ns()
    side.apply(bool(new))
    took = (time.process_time_ns() - began) / 1e3
    for name in names:
        side.requests.remove_request(name)
    side.tables.num_blocks.np[0, :appended] %= 100
    return took


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    import torch

    import_module("vllm.v1.worker.cpu.shm")
    from hal_vllm.checking import Report, replacements
    from hal_vllm.installing import open_stage
    from hal_vllm.kernels import GPU, KERNELS
    from hal_vllm.sides import Sides, Slots

    stage = open_stage(options.device, torch.device("cpu"))
    sides = Sides(replacements(stage, {}, Report()))
    name = f"{GPU}.buffer_utils._apply_write_kernel"
    own_kernel = import_module("vllm.triton_utils.dispatcher").KernelOverride(KERNELS[name], KERNELS[name])
    vars(import_module(f"{GPU}.buffer_utils"))["_apply_write_kernel"] = own_kernel
    sides.bindings = [one for one in sides.bindings if one[1] != "_apply_write_kernel"]
    sides.play(False)
    own = Slots(SIZES, torch.device("cpu"), None)
    sides.play(True)
    over = Slots(SIZES, torch.device("cpu"), stage)
    print("| new requests | appended blocks | own, us | hal, us | ratio |\n|--:|--:|--:|--:|--:|")
    for new, appended in CASES:
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds):
            for hal in (number % 2 == 0, number % 2 == 1):
                sides.play(hal)
                took[hal].append(step(over if hal else own, new, appended, number))
        mine, theirs = (statistics.median(took[hal][20:]) for hal in (True, False))
        print(f"| {new} | {appended} | {theirs:.0f} | {mine:.0f} | {mine / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
