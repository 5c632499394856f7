"""Tokens a second of the whole main job (engine, worker, model, sampling) with the embedded checkpoint, greedy, on cpu.

    python benchmarks/generation.py [--python DIR/bin/python] [--before DIR] [--threads N] [--rounds N]

``--python`` is an interpreter with transformers and torch, whose ``generate`` answers the same prompts from the same
checkpoint; ``--before`` is another checkout of this repository. All take turns in one run, each in a process of its
own with as many threads; what is printed are medians, and of the ratios within a round. Loading is not timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "hal" / "model" / "default"
SLOTS, PROMPT, NEW_TOKENS, VOCAB = (1, 8, 32), 64, 64, 2048
Job = Callable[[list[list[int]]], None]


def prompts(count: int) -> list[list[int]]:
    """``count`` prompts of ``PROMPT`` tokens, the same in every process."""
    draw = random.Random(5)
    return [[draw.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(count)]


def hal_job(device: Any) -> Job:  # noqa: ANN401 (hal is imported in the processes that need it alone)
    """Prompts through the engine, as ``hal run`` feeds them."""
    from hal_core import Request, SamplingParams, StateConfig

    from hal.engine import Engine
    from hal.model.llama import LlamaModel
    from hal.worker import Worker

    model = LlamaModel.load(CHECKPOINT)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)

    class Unread:
        """A sink that nobody reads."""

        session = 1

        def put(self, pending: Any) -> None:  # noqa: ANN401 (a pending output is no public name)
            pending.complete(None)

        def close(self, timeout: float) -> None:
            """Nothing to drain."""

    def job(texts: list[list[int]]) -> None:
        sizes = StateConfig(num_slots=len(texts), max_model_len=PROMPT + NEW_TOKENS)
        engine = Engine(Worker(device, model, sizes, len(texts) * sizes.max_blocks, Unread()), chunk=1 << 20)
        for number, text in enumerate(texts):
            engine.submit(Request(f"r{number}", text, params))
        made = sum(len(done.token_ids) for done in engine.run())
        assert made == len(texts) * NEW_TOKENS, made

    return job


def transformers_job() -> Job:
    """All prompts in one call of ``generate``."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()

    def job(texts: list[list[int]]) -> None:
        ids = torch.tensor(texts)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        assert made.shape == (len(texts), PROMPT + NEW_TOKENS), made.shape

    return job


def serve(job: Job) -> None:
    """Answer each line of standard input, a number of prompts, with the seconds that they took."""
    for line in sys.stdin:
        texts = prompts(int(line))
        begin = time.perf_counter()
        job(texts)
        print(json.dumps(time.perf_counter() - begin), flush=True)


class Party:
    """One that takes part: a process that waits for its turns."""

    def __init__(self, python: str, kind: str, threads: int, path: Path = ROOT) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(threads)) | {"GLOG_minloglevel": "2"}
        paths = [str(path / part) for part in (".", "core/src")]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(path / "benchmarks" / "generation.py"), "--serve", kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, slots: int) -> float:
        """Tokens a second of one turn."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{slots}\n")
        self.process.stdin.flush()
        return slots * NEW_TOKENS / json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """No more turns."""
        self.process.communicate()


def has_transformers(python: str) -> bool:
    """Whether this interpreter can take part."""
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('transformers') and u.find_spec('torch')))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has transformers and torch")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=("hal", "transformers"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve == "transformers":
        serve(transformers_job())
        return
    if chosen.serve:
        import hal

        with hal.open_device("cpu") as device:
            serve(hal_job(device))
        return
    parties = {"hal": Party(sys.executable, "hal", chosen.threads)}
    if chosen.before:
        parties["hal before"] = Party(sys.executable, "hal", chosen.threads, chosen.before)
    if has_transformers(chosen.python):
        parties["transformers"] = Party(chosen.python, "transformers", chosen.threads)
    else:
        print(f"{chosen.python} has no transformers or no torch: give one that has with --python")
    print(f"tokens/s, {chosen.threads} thread(s), medians of {chosen.rounds} rounds (lowest to highest)")
    for slots in SLOTS:
        for party in parties.values():
            party.turn(slots)
        rates = {name: [] for name in parties}
        for _ in range(chosen.rounds):
            for name, party in parties.items():
                rates[name].append(party.turn(slots))
        for name, values in rates.items():
            median, spread = statistics.median(values), f"({min(values):.0f} to {max(values):.0f})"
            ratios = [own / other for own, other in zip(rates["hal"], values, strict=True)]
            ratio = "" if name == "hal" else f"hal is {statistics.median(ratios):.2f} of it"
            print(f"{slots:3} slots  {name:14}{median:8.0f}  {spread:18}{ratio}", flush=True)
    for party in parties.values():
        party.close()


if __name__ == "__main__":
    main()
