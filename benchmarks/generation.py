"""Greedy generation on the CPU against transformers: decode and prefill, of the default model and of one of 28 M.

    python benchmarks/generation.py [--python DIR/bin/python] [--before DIR] [--threads 1,2] [--rounds N] [--only CASE]

``--python`` is an interpreter with transformers and torch (``pip install torch==2.13.0 transformers safetensors``),
whose ``generate`` answers the same prompts from the same checkpoint. ``--before`` is another checkout of this
repository. Each is a process of its own with as many threads, and all take turns in one run. hal runs as ``hal run``
does by default: its environment, its chunks, a sink, and a reader that takes every record, in a process of its own.

- decode: prompts of 64 tokens, 64 new tokens each; tokens a second of all slots.
- prefill: one prompt, one new token; prompt tokens a second.

The table has medians, and the median of the ratios within a round: of elapsed time, and of processor time, which other
work on the machine disturbs less. The model of 28 M has random weights, drawn from a fixed seed. Each turn loads the
model again and warms up, neither of which is timed: the place of its weights in memory changes a decode step of a small
model by up to a half.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "engine/src/hal_engine/model" / "default"
SLOTS, PROMPT, NEW_TOKENS = (1, 8, 32), 64, 64
PREFILLS, WARM_TOKENS = (256, 320, 384), 4
VOCAB = 2048
"""Token ids of prompts are below this, which both models have."""
CASES = [("decode", slots, PROMPT, NEW_TOKENS) for slots in SLOTS] + [("prefill", 1, length, 1) for length in PREFILLS]
Answers = Sequence[Sequence[int]]
Job = Callable[[list[list[int]], int], Answers]
RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def write_random_model(folder: Path) -> None:
    """A Llama of 28 million parameters."""
    import numpy as np
    from safetensors.numpy import save_file

    draw, hidden, inner = np.random.default_rng(28), 512, 1408
    shapes = {"model.embed_tokens": (8192, hidden), "model.norm": (hidden,)}
    for number in range(8):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in ("q", "o")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden // 2, hidden) for name in ("k", "v")}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    tensors = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else draw.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RANDOM_MODEL))


@contextmanager
def hal_job(device: Any, checkpoint: Path, slots: int) -> Iterator[Job]:  # noqa: ANN401 (imported where it runs)
    """Prompts through the engine, as ``hal run --sink`` feeds them; a job ends when a reader, a process as ``hal tail``
    is, has every record."""
    from hal_core import Request, SamplingParams, StateConfig
    from hal_engine.engine import Engine
    from hal_engine.transport import open_sink
    from hal_paddle_runner.llama import LlamaModel
    from hal_paddle_runner.worker import Worker

    reader = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", str(Path(__file__).resolve()), "--serve", "reader"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    sink = open_sink(reader.stdout.readline().strip())
    sizes = StateConfig(num_slots=slots, max_model_len=512)
    engine = Engine(Worker(device, LlamaModel.load(checkpoint), sizes, slots * sizes.max_blocks, sink))

    def job(texts: list[list[int]], new_tokens: int) -> Answers:
        assert reader.stdin is not None
        assert reader.stdout is not None
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        print(len(texts) * new_tokens, file=reader.stdin, flush=True)
        for number, text in enumerate(texts):
            engine.submit(Request(f"r{number}", text, params))
        made = {done.request_id: done.token_ids for done in engine.run()}
        assert reader.stdout.readline() == "all\n", "a record did not come"
        return [made[f"r{number}"] for number in range(len(texts))]

    try:
        yield job
    finally:
        reader.stdin.close()
        sink.close(10)
        reader.wait(10)


def serve_reader() -> None:
    """Read records: for each line of standard input, a number of tokens, print a line when so many have arrived."""
    from hal_engine.reading import OutputReader

    with OutputReader() as reader:
        print(reader.url, flush=True)
        left = int(sys.stdin.readline())
        for record in reader:  # to the end of the session
            left -= len(record.tokens)
            if left == 0:
                print("all", flush=True)
                left = int(sys.stdin.readline() or -1)


@contextmanager
def transformers_job(checkpoint: Path) -> Iterator[Job]:
    """All prompts in one call of ``generate``."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # neither of the two ends before its last token

    def job(texts: list[list[int]], new_tokens: int) -> Answers:
        ids = torch.tensor(texts)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        answers: Answers = made[:, ids.shape[1] :].tolist()
        return answers

    yield job


def serve(make: Callable[[Path, int], AbstractContextManager[Job]]) -> None:
    """Answer each line of standard input, a case, with its elapsed and processor time and a digest of its answers."""
    for line in sys.stdin:
        checkpoint, slots, length, new_tokens = json.loads(line)
        draw = random.Random(5)
        texts = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(slots)]
        with make(Path(checkpoint), slots) as job:
            job(texts, min(new_tokens, WARM_TOKENS))
            began, used = time.perf_counter(), time.process_time()
            answers = job(texts, new_tokens)
            seconds, used = time.perf_counter() - began, time.process_time() - used
        assert [len(answer) for answer in answers] == [new_tokens] * slots
        digests = [hashlib.sha256(str(list(answer)).encode()).hexdigest() for answer in answers]
        print(json.dumps([seconds, used, digests]), flush=True)


def serve_hal() -> None:
    """The same, in the environment of the command, which a tree of before may not choose."""
    import hal

    name = next((name for name in ("hal_engine.mkl", "hal.cli.mkl") if importlib.util.find_spec(name)), None)
    if name is not None:
        importlib.import_module(name).choose_kernels(os.environ)
    with hal.open_device("cpu") as device:
        serve(lambda checkpoint, slots: hal_job(device, checkpoint, slots))


class Party:
    """One that takes part: a process that waits for its turns."""

    def __init__(self, python: str, kind: str, threads: int, path: Path = ROOT) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(threads)) | {"GLOG_minloglevel": "2"}
        paths = [str(path / part) for part in (".", "core/src")]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [python, "-P", "-W", "ignore", str(Path(__file__).resolve()), "--serve", kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, checkpoint: Path, case: tuple[str, int, int, int]) -> tuple[float, float, list[str]]:
        """Elapsed and processor time of one turn, and digests of the answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(checkpoint), *case[1:]]) + "\n")
        self.process.stdin.flush()
        seconds, used, digests = json.loads(self.process.stdout.readline())
        return seconds, used, digests

    def close(self) -> None:
        """No more turns."""
        self.process.communicate()


def compare(
    parties: dict[str, Party], model: str, checkpoint: Path, case: tuple[str, int, int, int], rounds: int
) -> None:
    """Measure one case, and print its rows of the table."""
    kind, slots, length, new_tokens = case
    turns = {name: [] for name in parties}
    names = list(parties)
    for number in range(rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            turns[name].append(parties[name].turn(checkpoint, case))
    tokens, own = slots * (length if kind == "prefill" else new_tokens), turns["hal"]
    for name, found in turns.items():
        rates = [tokens / seconds for seconds, _, _ in found]
        row = f"{model} | {kind} {length if kind == 'prefill' else slots} | {name} | {statistics.median(rates):.0f} | "
        row += f"{min(rates):.0f} to {max(rates):.0f} | "
        if name != "hal":
            elapsed, used = (
                statistics.median(other[at] / mine[at] for mine, other in zip(own, found, strict=True)) for at in (0, 1)
            )
            alike = sum(mine == other for mine, other in zip(own[0][2], found[0][2], strict=True))
            row += f"{elapsed:.2f} | {used:.2f} | {alike} of {slots}"
        else:
            row += "| |"
        print(f"| {row} |", flush=True)


def cpu_name() -> str:
    """Return the kernel's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = found.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')}), {os.cpu_count()} cores"


def versions_of(python: str, names: Sequence[str]) -> str:
    """The versions of some distributions of an interpreter, in one line; raises KeyError where one is missing."""
    code = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has transformers and torch")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with this in their name, as 'default prefill'"
    )
    parser.add_argument("--serve", choices=("hal", "reader", "transformers"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve == "transformers":
        serve(lambda checkpoint, slots: transformers_job(checkpoint))
        return
    if chosen.serve == "reader":
        serve_reader()
        return
    if chosen.serve:
        serve_hal()
        return
    theirs = versions_of(chosen.python, ("transformers", "torch"))
    if not theirs:
        print(f"{chosen.python} has no transformers or no torch: give one that has with --python")
    print(f"{cpu_name()}; Python {platform.python_version()}, {versions_of(sys.executable, ('paddlepaddle', 'numpy'))}")
    print(f"{theirs}; medians of {chosen.rounds} rounds (lowest to highest)")
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder))
        for threads in map(int, chosen.threads.split(",")):
            parties = {"hal": Party(sys.executable, "hal", threads)}
            if chosen.before:
                parties["hal before"] = Party(sys.executable, "hal", threads, chosen.before.resolve())
            if theirs:
                parties["transformers"] = Party(chosen.python, "transformers", threads)
            print(f"\n{threads} thread(s)\n\n| model | case | | tokens/s | | hal is, elapsed | processor | equal |")
            print("|---|---|---|---:|---|---:|---:|---:|")
            for model, checkpoint in (("default", DEFAULT), ("28 M", Path(folder))):
                for case in CASES:
                    if chosen.only in f"{model} {case[0]} {case[1 if case[0] == 'decode' else 2]}":
                        compare(parties, model, checkpoint, case, chosen.rounds)
            for party in parties.values():
                party.close()


if __name__ == "__main__":
    main()
