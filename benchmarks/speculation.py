"""Tokens a second of the whole main job with each proposer, beside those of plain decoding, on cpu.

    python benchmarks/speculation.py --short
    python benchmarks/speculation.py [--speculate NAME[:K] …] [--drafts K] [--rounds N] [--workload NAME …]

``--short`` measures the targets, in one table of a few minutes, and the cost of a proposal
(``benchmarks/proposers.py``).

All proposers take turns in one run, in a new order each round, with the embedded checkpoint; printed are medians of the
ratio to plain decoding within a round (by the clock, and by processor time, which neighbours disturb less), tokens that
a step gives a request, and the share of drafts that was accepted. ``NAME:K`` is a proposer with up to K drafts.

``repeats`` is one greedy request whose prompt repeats itself, ``text`` one that begins a module (this model's greedy
output soon loops there too). ``held-out`` are pieces of modules that the model was not trained on, one request after
the other, chosen because its greedy output does not loop there: the number of answers with eight tokens in a row twice
is printed. The remaining workloads are 16 requests, or one, at the temperature in their names.

Every answer is compared with that of plain decoding. Sums differ in the last bits between steps of other shapes, and
with them a token that was chosen by less than that: where answers differ, the margin of plain decoding's choice is
printed (greedy: to the second best logit; drawn: of the number drawn to the edge of the token's interval). 1e-3 or more
is a fault.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import sysconfig
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import HalError, Request, SamplingParams, StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.proposers import Setup, make_proposer
from hal_paddle_runner.runner import ModelRunner
from hal_paddle_runner.worker import Worker

import hal

if TYPE_CHECKING:
    from hal_paddle_runner.tokens import StepTokens

BUILT_IN = ("none", "naive", "ngram", "suffix", "mtp", "hybrid")
LOOP = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n\n"
TEXT = '''"""Read a file of settings."""

import json
from pathlib import Path


class Settings:
    """What a program is told by its user."""

    def __init__(self, path: Path) -> None:
        self.path = path
'''
STARTS = ("def read(", "class Node:\n", "import os\n", "for name in ", "if not ", "return [", "try:\n", "with open(")


@dataclass(frozen=True)
class Workload:
    """Requests that are served together: their prompts, and how their tokens are drawn."""

    prompts: Sequence[str]
    temperature: float
    new_tokens: int = 192
    slots: int = 16


HELD_OUT = (
    ("distutils/command/install_headers.py", 9),
    ("tkinter/constants.py", 61),
    ("email/contentmanager.py", 60),
    ("copyreg.py", 82),
    ("xml/sax/xmlreader.py", 197),
    ("copyreg.py", 145),
    ("importlib/_abc.py", 26),
)
"""Of the standard library, files that the shipped model's training held out, and the line before a piece of them."""
LINES, TWICE = 12, 8
MARGIN = 1e-3
"""By so much, or more, a token was not chosen by the last bits of a sum."""
TARGETS = {("text", "mtp"): 1.3, ("held-out", "mtp"): 1.3, ("repeats", "ngram"): 1.5, ("repeats", "suffix"): 1.5}
TARGETS |= {(load, name): 0.9 for load in ("1 at 1.0", "1.0") for name in ("ngram", "suffix")}
"""Targets, relative to plain decoding: of the best number of drafts, if several are tried."""
SHORT = {
    "repeats": ("ngram", "suffix", "mtp:5"),
    "text": ("mtp:2", "mtp:3", "mtp:5"),
    "held-out": ("mtp:2", "mtp:3", "mtp:5", "ngram"),
    "1 at 0.7": ("mtp:3",),
    "1 at 1.0": ("ngram", "suffix", "mtp:3"),
    "16": ("ngram", "mtp:3"),
    "0.7": ("ngram", "mtp:3"),
    "1.0": ("ngram", "suffix", "mtp:3"),
}


def held_out(library: Path) -> list[str]:
    """The pieces of ``HELD_OUT`` that a folder of the standard library has."""
    found = []
    for name, line in HELD_OUT:
        if (library / name).exists():
            lines = (library / name).read_text(encoding="utf-8").splitlines(keepends=True)
            found.append("".join(lines[line : line + LINES]))
    return found


WORKLOADS = {
    "repeats": Workload([LOOP * 3], 0.0),
    "text": Workload([TEXT], 0.0),
    "held-out": Workload(held_out(Path(sysconfig.get_paths()["stdlib"])), 0.0, 48, slots=1),
    "16": Workload(STARTS * 2, 0.0, 64),
    "0.7": Workload(STARTS * 2, 0.7, 64),
    "1.0": Workload(STARTS * 2, 1.0, 64),
    "1 at 0.7": Workload([TEXT], 0.7),
    "1 at 1.0": Workload([TEXT], 1.0),
}


class Unread:
    """A sink without a reader."""

    session = 1

    def put(self, pending: Any) -> None:  # noqa: ANN401 (a pending output is no public name)
        """Take a record."""
        pending.complete(None)

    def close(self, timeout: float) -> None:
        """Return at once."""


class Watched(ModelRunner):
    """Notes how far each choice was from another one: request id to margins, in the order of its tokens."""

    margins: dict[str, list[float]]

    def _write(self, tokens: StepTokens) -> None:
        requests = self.state.host_table.requests
        for slot, margin in zip(tokens.slots.tolist(), tokens.margins.tolist(), strict=True):
            self.margins[requests[slot].request_id].append(margin)
        super()._write(tokens)


class WatchedWorker(Worker):
    """A worker with it."""

    runner_type = Watched


@dataclass(frozen=True)
class Run:
    """One serving of a workload."""

    tokens: Mapping[str, tuple[int, ...]]
    margins: Mapping[str, Sequence[float]]
    seconds: float
    busy: float
    tokens_a_turn: float
    accepted: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds

    def partings(self, plain: Run) -> list[float]:
        """Where answers part from those of plain decoding: the margin of its choice there, of each that does."""
        found = []
        for name, tokens in plain.tokens.items():
            other = self.tokens.get(name, ())
            if other != tokens:
                pairs = zip(tokens, other, strict=False)
                at = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(tokens), len(other)))
                found.append(plain.margins[name][at] if at < len(tokens) else float("inf"))
        return found


def serve(device: Any, model: Any, encoded: Sequence[list[int]], load: Workload, name: str, drafts: int) -> Run:  # noqa: ANN401
    """Serve a workload with one proposer, ``NAME`` or ``NAME:K``."""
    name, _, own = name.partition(":")
    drafts = int(own or drafts)
    sizes = StateConfig(
        num_slots=min(load.slots, len(encoded)),
        max_model_len=max(map(len, encoded)) + load.new_tokens,
        max_draft_tokens=0 if name == "none" else drafts,
    )
    setup = Setup(drafts, sizes.num_slots, sizes.max_model_len, model.config.vocab_size, model)
    worker = WatchedWorker(
        device, model, sizes, sizes.num_slots * sizes.max_blocks, Unread(), proposer=make_proposer(name, setup)
    )
    worker.runner.margins = margins = defaultdict(list)
    engine = Engine(worker, Limits(chunk=1 << 20))
    for number, prompt in enumerate(encoded):
        params = SamplingParams(
            temperature=load.temperature, seed=number, max_tokens=load.new_tokens, min_tokens=load.new_tokens
        )
        engine.submit(Request(f"r{number}", prompt, params))
    begin, busy = time.perf_counter(), time.process_time()
    tokens = {done.request_id: done.token_ids for done in engine.run()}
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    acceptance = worker.acceptance
    share = acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0
    return Run(tokens, margins, seconds, busy, acceptance.tokens_a_turn or 1.0, share)


def usable(names: Sequence[str], model: Any) -> list[str]:  # noqa: ANN401
    """Return the proposers of ``names`` that can be made here; print why the rest cannot."""
    found = []
    for name in names:
        try:
            proposer = make_proposer(name.partition(":")[0], Setup(1, 1, 64, model.config.vocab_size, model))
        except HalError as error:
            print(f"{name}: left out, {error.what}")
            continue
        if proposer is not None:
            proposer.close()
        found.append(name)
    return found


def main() -> int:
    """Measure; 1 if a proposer changed a token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", nargs="+", default=list(BUILT_IN))
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--library", type=Path, metavar="DIR", help="of which Python held-out is: that of 3.11 has all")
    parser.add_argument("--short", action="store_true", help="what is aimed at, in one table")
    options = parser.parse_args()
    if options.library:
        WORKLOADS["held-out"] = replace(WORKLOADS["held-out"], prompts=held_out(options.library))
    warnings.filterwarnings("ignore", module="paddle")
    from hal_paddle_runner.loading import load_model

    model, changed = load_model(DEFAULT_CHECKPOINT), 0
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, model.config)
    names = ["none", *(name for name in options.speculate if name != "none")]
    tried = SHORT if options.short else dict.fromkeys(options.workload, names)
    with hal.open_device("cpu") as device:
        for title, chosen in tried.items():
            load, names = WORKLOADS[title], usable(["none", *(name for name in chosen if name != "none")], model)
            encoded = [tokenizer.encode(prompt) for prompt in load.prompts]
            runs: dict[str, list[Run]] = {name: [] for name in names}
            for round_ in range(options.rounds + 1):  # the first one warms up
                for name in random.Random(round_).sample(names, len(names)):
                    runs[name].append(serve(device, model, encoded, load, name, options.drafts))
            changed += show(title, runs)
    if options.short:
        print(flush=True)
        subprocess.run([sys.executable, Path(__file__).with_name("proposers.py"), "--slots", "4"], check=False)
    return int(changed > 0)


def show(title: str, runs: Mapping[str, Sequence[Run]]) -> int:
    """Print a workload's table; how many runs gave tokens that plain decoding would not have given."""
    plain = runs["none"]
    heads = f"{'tokens/s':>9} {'of plain':>9} {'(from, to)':>13} {'by cpu':>7} {'a turn':>7} {'accepted':>9}"
    answers = plain[0].tokens.values()
    looping = sum(loops(tokens) for tokens in answers)
    print(f"\n{title:10} {heads}   ({looping} of {len(answers)} answers have {TWICE} tokens in a row twice)")
    changed, best = 0, dict[str, float]()
    for name, of_one in runs.items():
        ratios = [run.speed / one.speed for run, one in zip(of_one, plain, strict=True)][1:]
        cpu = statistics.median([one.busy / run.busy for run, one in zip(of_one, plain, strict=True)][1:])
        last, middle = of_one[-1], statistics.median(ratios)
        partings = [run.partings(plain[0]) for run in of_one]
        faults = sum(max(margins, default=0.0) >= MARGIN for margins in partings)
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
        speed = statistics.median(run.speed for run in of_one[1:])
        note = partings_note(partings, len(plain[0].tokens))
        columns = f"{speed:9.0f} {middle:8.2f}x {spread:>13} {cpu:6.2f}x {last.tokens_a_turn:7.2f} {last.accepted:9.1%}"
        print(f"{name:10} {columns}{note}", flush=True)
        changed += faults
        kind = name.partition(":")[0]
        best[kind] = max(best.get(kind, 0.0), middle)
    for kind, ratio in best.items():
        if (wanted := TARGETS.get((title, kind))) is not None:
            print(f"{'':10} {kind}: {ratio:.2f}x, aimed at {wanted:.2f}x: {'reached' if ratio >= wanted else 'MISSED'}")
    return changed


def partings_note(partings: Sequence[Sequence[float]], requests: int) -> str:
    """How many answers of these runs part from plain decoding's, and by which margins; "" for none."""
    margins = sorted(margin for of_one in partings for margin in of_one)
    if not margins:
        return ""
    note = f"  {len(margins)} of {requests * len(partings)} answers part where the margin is at most {margins[-1]:.1e}"
    return f"{note}: WRONG, as it is {MARGIN:g} or more" if margins[-1] >= MARGIN else note


def loops(tokens: Sequence[int]) -> bool:
    """Return whether some eight consecutive tokens occur in it twice."""
    pieces = [tuple(tokens[at : at + TWICE]) for at in range(len(tokens) - TWICE + 1)]
    return len(set(pieces)) < len(pieces)


if __name__ == "__main__":
    sys.exit(main())
