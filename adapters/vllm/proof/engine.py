"""vLLM's real engine on the same requests: runner V1, V2 with its own buffers, V2 over hal. Their tokens must be equal.

    python adapters/vllm/proof/engine.py MODEL [SCENARIO ... | --speed]

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
BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "block_size": 32}
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
    "aborts": ({"max_num_seqs": 16, "max_num_batched_tokens": 128}, 64, 10, "greedy"),
    "512 requests, 128 slots": ({"max_num_seqs": 128, "max_num_batched_tokens": 512}, 512, 11, "greedy"),
    "n = 4, prefix cache": ({"max_num_seqs": 16, "max_num_batched_tokens": 128}, 16, 12, "seeded, several"),
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
        chosen["n"] = 4 if kind == "seeded, several" and chosen["temperature"] else 1
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
        llm = LLM(model=model, **BASE, kv_cache_memory_bytes=64 << 20, disable_log_stats=False, **options)
        began = time.process_time()
        play = _aborting if name == "aborts" else _generating
        tokens = play(llm, prompts, chosen)
        took = time.process_time() - began
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


def _generating(llm: Any, prompts: list[str], chosen: list[Any]) -> list[list[int]]:  # noqa: ANN401 (vLLM's LLM)
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    return [list(each.token_ids) for one in outputs for each in one.outputs]


def _aborting(llm: Any, prompts: list[str], chosen: list[Any]) -> list[list[int]]:  # noqa: ANN401 (vLLM's LLM)
    """Abort every fifth request, one in three steps, and return the tokens of the others. Some of them wait, run or are
    done by then."""
    engine, tokens, steps = llm.llm_engine, dict.fromkeys(map(str, range(len(prompts)))), 0
    for number, (prompt, one) in enumerate(zip(prompts, chosen, strict=True)):
        engine.add_request(str(number), prompt, one)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps % 3 == 0:
            engine.abort_request([str(steps // 3 * 5)])
    return [found or [] for number, found in tokens.items() if int(number) % 5]


def speed(model: str) -> None:
    """Print the processor time of a step of 1, 8, 32 and 128 requests that decode, in microseconds: the least of four
    rounds of 64 steps."""
    from vllm import LLM, SamplingParams

    for count in (1, 8, 32, 128):
        llm = LLM(model=model, **BASE, max_num_seqs=count, kv_cache_memory_bytes=256 << 20)
        chosen = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        took = []
        for _ in range(5):
            began = time.process_time()
            llm.generate(["def main(self):"] * count, chosen, use_tqdm=False)
            took.append(time.process_time() - began)
        print(json.dumps({"requests": count, "us": round(min(took[1:]) / 64 * 1e6)}), flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def compare_speed(model: str) -> int:
    """Print a step over hal beside one over vLLM's own buffers with the same kernels: processes in turn, the least."""
    found: dict[tuple[str, int], int] = {}
    for runner in ("own", "hal", "hal", "own"):
        for line in _child(model, runner, "--speed"):
            key = (runner, line["requests"])
            found[key] = min(line["us"], found.get(key, line["us"]))
    for count in (1, 8, 32, 128):
        own, over = found["own", count], found["hal", count]
        print(f"| {count} | {own} | {over} | {over / own:.2f} |", flush=True)
    return 0


def _child(model: str, runner: str, *names: str) -> list[dict[str, Any]]:
    """Run scenarios in a process of a runner, and return its lines."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet |= {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, model, "--in", runner, *names]
    child = subprocess.run(command, env=os.environ | quiet | RUNNERS[runner], stdout=subprocess.PIPE, text=True)
    if child.returncode:
        print(f"{runner}: exit status {child.returncode}", flush=True)
    return [json.loads(text) for text in child.stdout.splitlines() if text.startswith("{")]


def seeded(name: str) -> bool:
    """Return whether a scenario draws random numbers."""
    return SCENARIOS[name][3].startswith("seeded")


def compare(model: str, names: list[str]) -> int:
    """Run each runner in a process, and return how many scenarios differ."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    parts = [(runner, [name]) for runner in RUNNERS for name in names if runner == "v1" and not seeded(name)]
    parts += [(runner, names) for runner in RUNNERS if runner != "v1"]
    for runner, those in parts:
        for line in _child(model, runner, *those):
            found[line["scenario"]][runner] = line.pop("tokens")
            print(json.dumps(line), flush=True)
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
    if sys.argv[2:3] == ["--in"] and sys.argv[4:] == ["--speed"]:
        speed(sys.argv[1])
    elif sys.argv[2:3] == ["--in"]:
        run(sys.argv[3], sys.argv[1], sys.argv[4:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            chosen = Path(sys.argv[1])
            if "num_nextn_predict_layers" in json.loads((chosen / "config.json").read_text()):
                chosen = runnable(chosen, Path(folder))
            if sys.argv[2:] == ["--speed"]:
                sys.exit(compare_speed(str(chosen)))
            sys.exit(bool(compare(str(chosen), sys.argv[2:] or list(SCENARIOS))))
