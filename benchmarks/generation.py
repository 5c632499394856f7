"""Greedy generation on the CPU beside transformers, CTranslate2 and vLLM, of the default model and of one of 28 M.

    python benchmarks/generation.py [--python PYTHON]... [--before DIR] [--threads 1,2] [--rounds N] [--only CASE]

``--python`` is an interpreter with some of the others, each of which takes part where it is found first:
``pip install torch==2.13.0 transformers safetensors``; ``ctranslate2`` beside them; ``vllm``. They answer the same
prompts from the same checkpoint, in float32. ``--before`` is another checkout of this repository. Each is a process of
its own with as many threads, and all take turns in one run. hal runs as ``hal.generate`` does: in the environment of
the command, with its chunks, its records taken over in the process.

- decode: prompts of 8 tokens, 48 new tokens each; tokens a second of all slots.
- prefill: one prompt, one new token; prompt tokens a second.

The table has tokens a second of processor time, by medians, and the median of the ratios within a round: of elapsed
time, and of processor time, which other work on the machine disturbs less. It is that of a process and of all its
children, also of those that ended. The model of 28 M has random weights, drawn from a fixed seed. Each turn loads the
model again (not vLLM, whose start takes long) and warms up, neither of which is timed: the place of its weights in
memory changes a decode step of a small model by up to a half.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "engine/src/hal_engine/model" / "default"
SLOTS, PROMPT, NEW_TOKENS = (1, 8, 32), 8, 48
PREFILLS, WARM_TOKENS, LONGEST = (256, 384), 4, 512
LEAST_SECONDS = 0.5
"""A turn repeats its case for so long."""
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
    shutil.copy(DEFAULT / "tokenizer.json", folder)  # CTranslate2's converter wants one


def write_default_model(folder: Path) -> None:
    """The default model without its prediction layer, which vLLM refuses."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((DEFAULT / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    behind = f"model.layers.{config['num_hidden_layers']}."
    tensors = load_file(DEFAULT / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(DEFAULT / "tokenizer.json", folder)


@contextmanager
def hal_job(device: Any, checkpoint: Path, slots: int) -> Iterator[Job]:  # noqa: ANN401 (imported where it runs)
    """Prompts through the engine, with a runner's worker as ``hal.generate`` opens it."""
    from hal_core import Request, SamplingParams, StateConfig
    from hal_engine.engine import Engine
    from hal_engine.engine.handed import HandedSink
    from hal_paddle_runner.loading import load_model
    from hal_paddle_runner.worker import Worker

    sink, sizes = HandedSink(), StateConfig(num_slots=slots, max_model_len=LONGEST)
    model = load_model(checkpoint)
    if hasattr(model, "prepare"):  # a tree of before has no such thing
        model.prepare(slots)
    worker = Worker(device, model, sizes, slots * sizes.max_blocks, sink)
    engine = Engine(worker, on_record=sink.take)

    def job(texts: list[list[int]], new_tokens: int) -> Answers:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        for number, text in enumerate(texts):
            engine.submit(Request(f"r{number}", text, params))
        made = {done.request_id: done.token_ids for done in engine.run()}
        return [made[f"r{number}"] for number in range(len(texts))]

    yield job
    sink.close(10)


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


@functools.cache
def converted(checkpoint: Path) -> tempfile.TemporaryDirectory[str]:
    """The folder of a checkpoint in CTranslate2's format."""
    ctranslate2, transformers = importlib.import_module("ctranslate2"), importlib.import_module("transformers")
    folder = tempfile.TemporaryDirectory()

    class Converter(ctranslate2.converters.TransformersConverter):  # type: ignore[misc, name-defined]
        def load_tokenizer(self, tokenizer_class: object, name: str, **more: object) -> object:
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(Path(name) / "tokenizer.json"))
            found.bos_token = found.eos_token = found.unk_token = found.convert_ids_to_tokens(0)
            return found

    Converter(str(checkpoint)).convert(folder.name, force=True)
    return folder


@contextmanager
def ctranslate2_job(checkpoint: Path) -> Iterator[Job]:
    """All prompts in one call of ``generate_batch``, of the model that its converter makes of the checkpoint."""
    folder, threads = converted(checkpoint).name, int(os.environ["OMP_NUM_THREADS"])
    words = json.loads((Path(folder) / "vocabulary.json").read_text())
    places = {word: number for number, word in enumerate(words)}
    generator = importlib.import_module("ctranslate2").Generator(
        folder, intra_threads=threads, inter_threads=1, compute_type="float32"
    )

    def job(texts: list[list[int]], new_tokens: int) -> Answers:
        found = generator.generate_batch(
            [[words[token] for token in text] for text in texts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=0,
            end_token=[],
        )
        return [[places[word] for word in one.sequences[0]] for one in found]

    yield job


@functools.cache
def vllm_engine(checkpoint: Path) -> Any:  # noqa: ANN401 (another's)
    """vLLM's engine of a checkpoint, which stays open."""
    return importlib.import_module("vllm").LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=max(SLOTS),
        enable_prefix_caching=False,
    )


@contextmanager
def vllm_job(checkpoint: Path) -> Iterator[Job]:
    """All prompts in one call of ``LLM.generate``."""
    vllm, engine = importlib.import_module("vllm"), vllm_engine(checkpoint)

    def job(texts: list[list[int]], new_tokens: int) -> Answers:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": text} for text in texts]
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params, use_tqdm=False)]

    yield job


def processor_time() -> float:
    """Seconds of processor time of this process, of its children that ended, and of those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total, left = time.process_time() + ended.ru_utime + ended.ru_stime, _children(os.getpid())
    while left:
        child = left.pop()
        left += _children(child)
        for thread in Path(f"/proc/{child}/task").glob("*/schedstat"):
            total += int(thread.read_text().split()[0]) / 1e9
        parts = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(parts[13]) + int(parts[14])) / os.sysconf("SC_CLK_TCK")  # of its children that ended
    return total


def _children(process: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{process}/task").glob("*/children") for one in path.read_text().split()]


def serve(make: Callable[[Path, int], AbstractContextManager[Job]], answers: IO[str]) -> None:
    """Answer each line of standard input, a case, with its elapsed and processor time and a digest of its answers."""
    for line in sys.stdin:
        checkpoint, slots, length, new_tokens = json.loads(line)
        draw = random.Random(5)
        texts = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(slots)]
        with make(Path(checkpoint), slots) as job:
            job(texts, min(new_tokens, WARM_TOKENS))
            began, used = time.perf_counter(), processor_time()
            times = 0
            while not times or (time.perf_counter() - began < LEAST_SECONDS):
                made, times = job(texts, new_tokens), times + 1
            seconds, used = (time.perf_counter() - began) / times, (processor_time() - used) / times
        assert [len(answer) for answer in made] == [new_tokens] * slots
        digests = [hashlib.sha256(str(list(answer)).encode()).hexdigest() for answer in made]
        print(json.dumps([seconds, used, digests]), file=answers, flush=True)


def serve_hal(answers: IO[str]) -> None:
    """The same, in the environment of the command, which a tree of before may not choose."""
    import hal

    name = next((name for name in ("hal_engine.mkl", "hal.cli.mkl") if importlib.util.find_spec(name)), None)
    if name is not None:
        importlib.import_module(name).choose_kernels(os.environ)
    with hal.open_device("cpu") as device:
        serve(lambda checkpoint, slots: hal_job(device, checkpoint, slots), answers)


OTHERS = {"transformers": transformers_job, "ctranslate2": ctranslate2_job, "vllm": vllm_job}
NEEDED = {name: (name, "torch") for name in ("transformers", "vllm")} | {"ctranslate2": ("ctranslate2", "transformers")}


class Party:
    """One that takes part: a process that waits for its turns."""

    def __init__(self, python: str, kind: str, threads: int, path: Path = ROOT) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(threads)) | {"GLOG_minloglevel": "2"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
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
    turns: dict[str, list[tuple[float, float, list[str]]]] = {name: [] for name in parties}
    names = list(parties)
    for number in range(rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            turns[name].append(parties[name].turn(checkpoint, case))
    tokens, own = slots * (length if kind == "prefill" else new_tokens), turns["hal"]
    for name, found in turns.items():
        rates = [tokens / used for _, used, _ in found]
        row = f"{model} | {kind} {length if kind == 'prefill' else slots} | {name} | {statistics.median(rates):.0f} | "
        row += f"{min(rates):.0f} to {max(rates):.0f} | "
        if name != "hal":
            pairs = list(zip(own, found, strict=True))
            elapsed = statistics.median(other[0] / mine[0] for mine, other in pairs)
            used = statistics.median(other[1] / mine[1] for mine, other in pairs)
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
    """The versions of some packages of an interpreter, in one line; "" where one is missing."""
    code = "import importlib.metadata as m, sys; found = m.packages_distributions();"
    code += "print(', '.join(f'{n} {m.version(found[n][0])}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="an interpreter that has some of the others")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with this in their name, as 'default prefill'"
    )
    parser.add_argument("--serve", choices=("hal", *OTHERS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # others, and their children, print to it
        if chosen.serve == "hal":
            serve_hal(answers)
        else:
            serve(lambda checkpoint, slots: OTHERS[chosen.serve](checkpoint), answers)
        return
    theirs = {}
    for name, needed in NEEDED.items():
        found = [(python, versions) for python in chosen.python if (versions := versions_of(python, needed))]
        if found:
            theirs[name] = found[0]
        else:
            print(f"no interpreter with {' and '.join(needed)}: give one with --python")
    print(f"{cpu_name()}; Python {platform.python_version()}, {versions_of(sys.executable, ('paddle', 'numpy'))}")
    print("; ".join(versions for _, versions in theirs.values()), end="; ")
    print(f"medians of {chosen.rounds} rounds (lowest to highest)")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as default:
        write_random_model(Path(folder))
        write_default_model(Path(default))
        for threads in map(int, chosen.threads.split(",")):
            parties = {"hal": Party(sys.executable, "hal", threads)}
            if chosen.before:
                parties["hal before"] = Party(sys.executable, "hal", threads, chosen.before.resolve())
            parties |= {name: Party(python, name, threads) for name, (python, _) in theirs.items()}
            print(f"\n{threads} thread(s), tokens a second of processor time")
            print("\n| model | case | | tokens/s | | hal is, elapsed | processor | equal |")
            print("|---|---|---|---:|---|---:|---:|---:|")
            for model, checkpoint in (("default", Path(default)), ("28 M", Path(folder))):
                for case in CASES:
                    if chosen.only in f"{model} {case[0]} {case[1 if case[0] == 'decode' else 2]}":
                        compare(parties, model, checkpoint, case, chosen.rounds)
            for party in parties.values():
                party.close()


if __name__ == "__main__":
    main()
