"""vLLM on a GPU, with its own buffers and over hal: the same tokens and bytes, a held stream, the host's time.

    python adapters/vllm/proof/gpu.py CASE ... --model MODEL [--device cuda|torch_cuda]

MODEL: a small model that vLLM loads. Each engine has a process of its own, with ``HAL_VLLM=off`` or ``on``. Prints a
line of JSON a finding; the exit status is 1 if tokens or bytes differ. compute-sanitizer runs over it as over any
program: ``compute-sanitizer --tool memcheck python gpu.py bytes``. Run with vLLM 0.24.0 and torch 2.11.0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

GPU = "vllm.v1.worker.gpu"
Line = dict[str, Any]
SMALL: Line = {"dtype": "float32", "max_model_len": 512, "block_size": 16, "kv_cache_memory_bytes": 256 << 20}
SMALL |= {"gpu_memory_utilization": 0.05, "attention_backend": "TRITON_ATTN", "disable_log_stats": False}
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
FULL = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": SIZES}}
CONTROLS = [["greedy", 64, 1], ["controls", 48, 6], ["seeded", 64, 7]]
FEW = [["greedy", 32, 1], ["seeded", 32, 7]]
CASES: dict[str, tuple[Line, list[list[Any]]]] = {
    "tokens": (SMALL | {"max_num_seqs": 32, "max_num_batched_tokens": 256}, CONTROLS),
    "preemption": (
        SMALL | FULL | {"max_num_seqs": 128, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 400},
        [["greedy", 256, 11], ["seeded", 128, 12]],
    ),
    "nopin": (SMALL | FULL | {"max_num_seqs": 32}, FEW),
    "big": (
        {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_memory_bytes": 48 << 30, "load_format": "dummy"}
        | {"skip_tokenizer_init": True, "max_num_seqs": 256, "disable_log_stats": False},
        [["ids", 64, 1], ["ids", 64, 2], ["speed", 1, 0], ["speed", 32, 0], ["speed", 128, 0], ["speed", 256, 0]],
    ),
}
"""Of the cases with an engine: options, and the works (kind, requests, seed)."""
EIGHT_B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096}
EIGHT_B |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
EIGHT_B |= {"max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
STEPS, HELD = 500, 2.0
"""Applied while a stream is held for so many seconds."""


def say(**fields: object) -> None:
    """Print a finding."""
    print(json.dumps(fields), flush=True)


# -- engines, each in a process ---------------------------------------------------------------------------------------


def compare(case: str, model: str, folder: Path) -> bool:
    """Run the works of a case on both sides; return whether the tokens are equal."""
    options, works = CASES[case]
    if case == "big":
        (folder / "config.json").write_text(json.dumps(EIGHT_B))
        model = str(folder)
    found: dict[str, list[Line]] = {}
    unpinned = {"off, unpinned": "off", "on": "on"} if case == "nopin" else {"on": "on"}
    failed = []
    for name, side in {"off": "off", **unpinned}.items():
        spec = {"model": model, "options": options, "works": works, "nopin": case == "nopin" and name != "off"}
        lines = folder / f"{case}-{name}.jsonl"
        environment = os.environ | {"HAL_VLLM": side, "HAL_VLLM_REQUIRE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, __file__, "--inside", json.dumps(spec), "--lines", str(lines)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found[name] = [json.loads(one) for one in lines.read_text().splitlines()] if lines.exists() else []
        last = [one[:200] for one in done.stderr.splitlines() if "Error" in one][-1:]
        say(case=case, hal=name, status=done.returncode, error=last, seen=[one for one in found[name] if "rate" in one])
        if done.returncode:
            failed.append(name)
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr, flush=True)
    if failed != [name for name in unpinned if name != "on"]:  # vLLM's own does not start without pinned memory
        return False
    own, over = ([one for one in found[side] if "tokens" in one] for side in ("off", "on"))
    for mine, theirs in zip(own, over, strict=True):
        tokens = sum(len(one) for one in mine["tokens"])
        say(case=case, work=mine["work"], tokens=tokens, equal=mine["tokens"] == theirs["tokens"])
    return [one["tokens"] for one in own] == [one["tokens"] for one in over]


def inside(spec: Line, lines: Path) -> None:
    """Run an engine's works in this process; write a line each."""
    vllm = import_module("vllm")
    if spec["nopin"]:
        unpin()
    llm = vllm.LLM(model=spec["model"], seed=0, **spec["options"])
    with lines.open("w") as out:
        for kind, count, seed in spec["works"]:
            made = speed(llm, count) if kind == "speed" else generated(llm, kind, count, seed)
            out.write(json.dumps({"work": [kind, count, seed], **made}) + "\n")
            out.flush()


def generated(llm: Any, kind: str, count: int, seed: int) -> Line:  # noqa: ANN401 (vLLM's)
    """Return the tokens of some requests: of ids for a model without a tokenizer, or with engine.py's parameters."""
    params, draw = import_module("vllm").SamplingParams, random.Random(seed)
    prompts: list[Any] = []
    chosen = []
    engine = runpy.run_path(str(Path(__file__).with_name("engine.py")))
    text = Path(random.__file__).read_text()
    for number in range(count):
        if kind == "ids":
            prompts.append({"prompt_token_ids": [draw.randrange(100000) for _ in range(draw.choice([8, 60, 300]))]})
            more = {"temperature": seed - 1, "seed": number, "max_tokens": draw.randint(8, 64)}
            chosen.append(params(**more, ignore_eos=True, detokenize=False))
        else:
            length = draw.choice([8, 30, 120, 400, 700])
            begin = draw.randrange(len(text) - length)
            prompts.append(text[begin : begin + length])
            chosen.append(params(**engine["params"](draw, kind, number)))
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    return {"tokens": [list(each.token_ids) for one in outputs for each in one.outputs]}


def speed(llm: Any, count: int) -> Line:  # noqa: ANN401 (vLLM's)
    """Return tokens a second, the median of three rounds after one."""
    chosen = import_module("vllm").SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, detokenize=False)
    draw, rates = random.Random(5), []
    for _ in range(4):
        prompts = [{"prompt_token_ids": [draw.randrange(100000) for _ in range(32)]} for _ in range(count)]
        began = time.perf_counter()
        llm.generate(prompts, chosen, use_tqdm=False)
        rates.append(count * 128 / (time.perf_counter() - began))
    return {"requests": count, "rate": round(statistics.median(rates[1:]), 1)}


def unpin() -> None:
    """Let vLLM believe that no host memory can be pinned."""
    platform = import_module("vllm.platforms").current_platform
    type(platform).is_pin_memory_available = classmethod(lambda _: False)
    tools = import_module("vllm.utils.platform_utils")
    for function in (tools.is_pin_memory_available, tools.is_uva_available):
        getattr(function, "cache_clear", lambda: None)()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("PIN_MEMORY"):
            module.PIN_MEMORY = False  # type: ignore[attr-defined]
    assert not tools.is_uva_available()


# -- buffers alone ----------------------------------------------------------------------------------------------------


class Buffers:
    """vLLM's own classes, and hal's over a device of the GPU. ``uva``: as vLLM has ``all_token_ids``."""

    def __init__(self, device: str, *, uva: bool) -> None:
        self.torch = import_module("torch")
        import_module(f"{GPU}.model_runner")
        owner = import_module(f"{GPU}.buffer_utils")
        buffers, self.install = import_module("hal_vllm.buffers"), import_module("hal_vllm.installing")
        self.stage = self.install.open_stage(device, self.torch.device("cuda"), uva=uva)
        self.own = {name: vars(owner)[name] for name in buffers.CLASSES}
        kept = self.own["StagedWriteTensor"] if uva else None
        self.over = buffers.classes_over(self.stage, kept)

    def slots(self, rows: int, length: int, groups: int, vocabulary: int, *, hal: bool) -> Slots:
        """Return slot state of either side."""
        if hal:
            self.install.rename(self.own, self.over)
        try:
            return Slots(self, rows, length, groups, vocabulary, self.stage if hal else None)
        finally:
            if hal:
                self.install.rename(self.over, self.own)


class Slots:
    """Requests, block tables and sampling parameters of one side, as vLLM's runner has them."""

    def __init__(self, buffers: Buffers, rows: int, length: int, groups: int, vocabulary: int, stage: Any) -> None:  # noqa: ANN401
        def get(module: str, name: str) -> Any:  # noqa: ANN401 (a class of vLLM's)
            return getattr(import_module(f"{GPU}.{module}"), name)

        device, self.stage = buffers.torch.device("cuda:0"), stage
        self.requests = get("states", "RequestState")(rows, length, 2048, 0, vocabulary, device)
        widths, most = [16] * groups, [length // 16 + 1] * groups
        self.tables = get("block_table", "BlockTables")(widths, rows, 2048, most, device, widths)
        self.sampler = get("sample.sampler", "Sampler")(rows, vocabulary, device, self.requests)
        owner = "hal_vllm.buffers" if stage is not None else f"{GPU}.buffer_utils"
        assert type(self.requests.total_len).__module__ == owner, type(self.requests.total_len)

    def add(self, name: str, drawn: Line) -> None:
        """Stage a request."""
        self.requests.add_request(name, drawn["prompt"], drawn["tokens"], drawn["done"], 8)
        row = self.requests.req_id_to_index[name]
        self.tables.append_block_ids(row, drawn["blocks"], overwrite=True)
        self.sampler.add_request(row, drawn["prompt"], drawn["params"])

    def apply(self, *, fresh: bool) -> None:
        """A step's applies."""
        if fresh:
            self.requests.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.tables.apply_staged_writes()
        if self.stage is not None:
            self.stage.flush()

    def tensors(self) -> list[Any]:
        """Return every tensor of the state on the device but addresses."""
        states = [value for value in vars(self.sampler).values() if hasattr(value, "apply_staged_writes")]
        values = [value for part in (self.requests, self.tables, *states) for value in vars(part).values()]
        flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
        found = [one if hasattr(one, "data_ptr") else getattr(one, "gpu", None) for one in flat]
        return [one for one in found if hasattr(one, "data_ptr") and not str(one.dtype).endswith("uint64")]


def same_bytes(device: str, sequences: int = 30) -> bool:
    """Drawn sequences on both sides: every tensor has the same bytes after each apply."""
    buffers, compared = Buffers(device, uva=False), 0
    drawn_request, torch = import_module("hal_vllm.sequences").drawn_request, buffers.torch
    for seed in range(sequences):
        draw, length, groups = random.Random(seed), 512, 1 + seed % 3
        sides, live, number = [buffers.slots(16, length, groups, 197, hal=hal) for hal in (False, True)], list[str](), 0
        for _ in range(12):
            for name in [one for one in live if draw.random() < 0.25]:
                live.remove(name)
                assert len({side.requests.remove_request(name) for side in sides}) == 1
            before, running = number, list(live)
            while len(live) < 16 and draw.random() < 0.7:
                number += 1
                drawn = drawn_request(draw, length, groups)
                live.append(f"r{number}")
                for side in sides:
                    side.add(live[-1], drawn)
            for name in [one for one in running if draw.random() < 0.5]:  # 0.24 has room for one write a row and group
                row = sides[0].requests.req_id_to_index[name]
                if int(sides[0].tables.num_blocks.np[:, row].max()) < length // 16:
                    more = tuple([draw.randrange(500)] for _ in range(groups))
                    for side in sides:
                        side.tables.append_block_ids(row, more, overwrite=False)
            for side in sides:
                side.apply(fresh=number > before)
            torch.cuda.synchronize()
            for own, over in zip(*(side.tensors() for side in sides), strict=True):
                compared += 1
                if not torch.equal(own.cpu().view(-1).view(torch.uint8), over.cpu().view(-1).view(torch.uint8)):
                    say(case="bytes", sequence=seed, differs=list(own.shape))
                    return False
    say(case="bytes", sequences=sequences, tensors=compared)
    return True


def held(device: str) -> bool:
    """The stream is held while steps are applied: how many readers saw the values of a later step?"""
    buffers = Buffers(device, uva=False)
    torch, wrong = buffers.torch, {}
    for side, classes in (("own", buffers.own), ("hal", buffers.over)):
        kept = classes["UvaBackedTensor"]((32,), torch.int32)
        seen = torch.full((STEPS, 32), -1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(int(HELD * 1.98e9))
        hold, under = torch.cuda.Event(), 0
        hold.record()
        for number in range(STEPS):
            kept.np[:] = number
            kept.copy_to_uva()
            if side == "hal":
                buffers.stage.flush()
            seen[number].copy_(kept.gpu, non_blocking=True)
            under += not hold.query()
        torch.cuda.synchronize()
        right = torch.arange(STEPS, dtype=torch.int32)[:, None]
        wrong[side] = int((seen.cpu() != right).any(1).sum())
        later = int((seen.cpu() > right).any(1).sum())
        say(case="held", side=side, steps=STEPS, queued_while_held=under, wrong=wrong[side], later=later)
    return not wrong["hal"] and bool(wrong["own"])


def applies(device: str) -> bool:
    """Host time of a step's applies, a step of each side in turn, quiet and beside busy threads."""
    buffers, go, stop = Buffers(device, uva=True), threading.Event(), threading.Event()
    sides = [buffers.slots(512, 4096, 1, 32000, hal=hal) for hal in (False, True)]
    params = import_module("vllm.sampling_params").SamplingParams(temperature=0.7, max_tokens=8, seed=1)
    drawn = {"prompt": 120, "tokens": list(range(120)), "done": 0, "blocks": (list(range(8)),), "params": params}

    def step(side: Slots, new: int, appended: int) -> float:
        names = [f"r{one}" for one in range(new)]
        for name in names:
            side.add(name, drawn)
        for row in range(appended):
            side.tables.append_block_ids(row, ([7],), overwrite=False)
        buffers.torch.cuda.synchronize()
        go.set()
        began = time.perf_counter_ns()
        side.apply(fresh=bool(new))
        took = (time.perf_counter_ns() - began) / 1e3
        go.clear()
        for name in names:
            side.requests.remove_request(name)
        side.tables.num_blocks.np[0, :] %= 100
        return took

    def spin() -> None:
        while not stop.is_set():
            go.wait()
            sum(range(200))

    for busy in (0, 1, 4):
        for _ in (None,) * (busy and max(1, busy - 1)):  # beside the one that runs already
            threading.Thread(target=spin, daemon=True).start()
        for count in (1, 32, 128, 256):
            for kind, new, appended in (("nothing", 0, 0), ("a block each", 0, count), ("all new", count, 0)):
                times = [[step(side, new, appended) for side in sides] for _ in range(20 if busy else 200)]
                own, over = (statistics.median(column) for column in zip(*times, strict=True))
                say(case="applies", busy=busy, requests=count, new=kind, own_us=round(own), hal_us=round(over))
    stop.set()
    go.set()
    return True


def main() -> int:
    """Run the cases."""
    alone: dict[str, Callable[[str], bool]] = {"bytes": same_bytes, "held": held, "applies": applies}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join([*CASES, *alone]))
    parser.add_argument("--model", default="", help="for tokens, preemption and nopin")
    parser.add_argument("--device", default="cuda", help="the hal device")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen.inside, chosen.lines)
        return 0
    if wrong := [one for one in chosen.cases if one not in CASES and one not in alone]:
        parser.error(f"{wrong[0]}: no such case")
    os.environ |= {"HAL_VLLM_DEVICE": chosen.device, "HAL_VLLM": "off"}  # the engines' processes have their own
    with tempfile.TemporaryDirectory() as folder:
        well = [
            alone[one](chosen.device) if one in alone else compare(one, chosen.model, Path(folder))
            for one in chosen.cases
        ]
    return 0 if well and all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
