"""vLLM's real engine on the same requests: runner V1, V2 with its own buffers, V2 over hal. Their tokens must be equal.

    python adapters/vllm/proof/engine.py MODEL [SCENARIO ...]

MODEL: a folder that vLLM loads, or one with hal's embedded checkpoint, of which a copy is made that vLLM loads. Each
runner has a process of its own, and V1 one for each scenario: vLLM 0.32 makes no second engine after n-gram drafts
there, as numba is loaded then. Prints a line for each scenario and runner; exit status 1 if tokens differ. Scenarios
with seeds are compared between the two V2 alone, as V1 draws other numbers.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

RUNNERS = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0", "HAL_VLLM": "off"},
    "own": {"VLLM_USE_V2_MODEL_RUNNER": "1", "HAL_VLLM": "kernels", "HAL_VLLM_REQUIRE": "1"},
    "hal": {"VLLM_USE_V2_MODEL_RUNNER": "1", "HAL_VLLM": "on", "HAL_VLLM_REQUIRE": "1"},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFTS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "speculative_config": NGRAM}
UNCACHED = {"enable_prefix_caching": False}
SCENARIOS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "plain": ({"max_num_seqs": 32}, 64, 1, "greedy"),
    "chunks, preemption": (
        {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40} | UNCACHED,
        64,
        2,
        "greedy",
    ),
    "prefix cache, preemption": (
        {"max_num_seqs": 12, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 48},
        64,
        3,
        "greedy",
    ),
    "ngram": (DRAFTS, 48, 4, "greedy"),
    "ngram, preemption": (
        DRAFTS | {"num_gpu_blocks_override": 44} | UNCACHED,
        48,
        5,
        "greedy",
    ),
    "greedy controls": ({"max_num_seqs": 16, "max_num_batched_tokens": 128}, 48, 6, "controls"),
    "grammars": ({"max_num_seqs": 16, "max_num_batched_tokens": 128}, 32, 9, "grammars"),
    "seeded": ({"max_num_seqs": 16, "max_num_batched_tokens": 128}, 64, 7, "seeded"),
    "seeded, ngram": (DRAFTS, 48, 8, "seeded drafts"),
}
"""Options, requests, seed, and how the requests are sampled."""


def runnable(source: Path, target: Path) -> Path:
    """Copy hal's embedded checkpoint without its MTP layer, whose tensors vLLM refuses."""
    import shutil

    from safetensors.numpy import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    for one in source.iterdir():
        if one.is_file() and one.name not in ("model.safetensors", "config.json"):
            shutil.copy(one, target)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.")}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def params(draw: random.Random, kind: str, number: int) -> dict[str, Any]:
    """Return one request's parameters."""
    chosen: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(1, 60), "ignore_eos": True}
    if kind == "greedy":
        return chosen
    if kind == "grammars":
        from vllm.sampling_params import StructuredOutputsParams

        given = draw.choice([{"regex": "[a-z]{3,9}"}, {"choice": ["def", "class", "return"]}, None])
        return chosen | {"ignore_eos": False, "structured_outputs": given and StructuredOutputsParams(**given)}
    if kind.startswith("seeded"):
        chosen |= {"temperature": draw.choice([0, 0.5, 1, 1.3]), "seed": draw.choice([1, 2**40 + number, number])}
        chosen |= draw.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}])
    least = min(5, chosen["max_tokens"])
    more = draw.choice(
        [
            {},
            {"presence_penalty": 0.7, "frequency_penalty": 0.3},
            {"repetition_penalty": 1.3},
            {"logit_bias": {3: 5.0, 40: -2.0}},
            {"min_tokens": least, "stop_token_ids": [1, 2, 40]},
            {"bad_words": ["the", "return self"]},
            {"allowed_token_ids": [5, 9, 40, 41, 42, 100]},
            {"logprobs": 3, "prompt_logprobs": 2},
        ]
    )
    if kind == "seeded drafts":  # vLLM takes neither with drafts
        chosen.pop("min_p", None)
        more = {name: value for name, value in more.items() if name != "logit_bias"}
    return chosen | more


def run(runner: str, model: str, names: list[str]) -> None:
    """Print a line for each scenario in this process."""
    from vllm import LLM, SamplingParams

    for name in names:
        options, count, seed, kind = SCENARIOS[name]
        draw = random.Random(seed)
        text = inspect.getsource(textwrap) + inspect.getsource(ast) + inspect.getsource(random)
        prompts = []
        for _ in range(count):
            length = draw.choice([8, 30, 120, 400, 700])
            begin = draw.randrange(len(text) - length)
            prompts.append(text[begin : begin + length])
        chosen = [SamplingParams(**params(draw, kind, number)) for number in range(count)]
        base: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "block_size": 32}
        llm = LLM(model=model, **base, kv_cache_memory_bytes=64 << 20, disable_log_stats=False, **options)
        began = time.process_time()
        outputs = llm.generate(prompts, chosen, use_tqdm=False)
        took = time.process_time() - began
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        seen = {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if hasattr(metric, "value") and metric.name.endswith(("num_preemptions", "num_accepted_tokens"))
        }
        counts: dict[str, int] = {}
        if runner == "hal":
            from hal_vllm.installing import STAGES

            counts = dict(STAGES[0].counts)
            STAGES[0].counts.clear()
        line = {"scenario": name, "runner": runner, "seconds": round(took, 2), "metrics": seen, "counts": counts}
        print(json.dumps(line | {"tokens": tokens}), flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def seeded(name: str) -> bool:
    """Return whether a scenario draws random numbers."""
    return SCENARIOS[name][3].startswith("seeded")


def compare(model: str, names: list[str]) -> int:
    """Run each runner in a process, and return how many scenarios differ."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet |= {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "OMP_NUM_THREADS": "1"}
    parts = [(runner, [name]) for runner in RUNNERS for name in names if runner == "v1" and not seeded(name)]
    parts += [(runner, names) for runner in RUNNERS if runner != "v1"]
    for runner, those in parts:
        environment = RUNNERS[runner]
        command = [sys.executable, __file__, model, "--in", runner, *those]
        child = subprocess.run(command, env=os.environ | quiet | environment, stdout=subprocess.PIPE, text=True)
        for text in child.stdout.splitlines():
            if text.startswith("{"):
                line = json.loads(text)
                found[line["scenario"]][runner] = line.pop("tokens")
                print(json.dumps(line), flush=True)
        if child.returncode:
            print(f"{runner}: exit status {child.returncode}", flush=True)
    wrong = 0
    for name, tokens in found.items():
        compared = ["own", "hal"] if seeded(name) else list(RUNNERS)
        equal = all(tokens.get(one) is not None and tokens.get(one) == tokens.get("hal") for one in compared)
        wrong += not equal
        differing = {
            one: sum(a != b for a, b in zip(tokens.get(one) or [], tokens.get("hal") or [], strict=False))
            for one in tokens
        }
        total = sum(map(len, tokens.get("hal") or []))
        print(f"{name}: {'equal' if equal else 'DIFFERENT'} ({' = '.join(compared)}), {total} tokens, {differing}")
    return wrong


if __name__ == "__main__":
    if sys.argv[2:3] == ["--in"]:
        run(sys.argv[3], sys.argv[1], sys.argv[4:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            chosen = Path(sys.argv[1])
            if "num_nextn_predict_layers" in json.loads((chosen / "config.json").read_text()):
                chosen = runnable(chosen, Path(folder))
            sys.exit(bool(compare(str(chosen), sys.argv[2:] or list(SCENARIOS))))
