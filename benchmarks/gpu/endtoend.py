"""End to end: the engine with ``runners/torch`` and a random model of 8 billion parameters as a decode node.

    python -m benchmarks.gpu.endtoend [--seconds 60] [--rounds 3] [--overlap on] [--out FOLDER] [--small]
    python -m benchmarks.gpu.endtoend --join A.json B.json   # of two GPUs that ran at once, with --step-ms and --first

Requests come with 1,024 tokens of keys and values in place, so nothing is prefilled; outputs of 64 to 512 tokens. They
arrive as a Poisson process that keeps 90 % of 128 slots busy, with bursts of 16 besides; a run begins with as many as
that in their slots, and its first second is not counted. Insertion by hal, by FastDeploy's way and by vLLM's way is the
only difference: the same arrivals, in turn. Needs ``runners/torch`` on the path. Without a GPU, or with ``--small``, a
small random model is served, as a check without measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hal_core import ALONE, MemorySink, Request, SamplingParams, SlotState, StateConfig, TaskBatch, TaskKind, admit
from hal_torch.model import Decoder
from hal_torch.runner import TorchRunner

from hal import open_device
from hal.engine import Engine
from hal.engine.worker import EngineWorker
from hal.model.config import parse_config
from hal.stepping import RunnerSetup

from .decode_node import FIRST_TOKEN, HAL, PER_FIELD, WAYS, DecodeScheduler, DecodeStepper, Inserting, inputs_of
from .load import Arrival, Shape, arrivals
from .serving import Run, Timed, figures, leave, serve, undisturbed, watched

EIGHT_B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
SMALL = EIGHT_B | {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SMALL_LOAD = Shape(8, 0.9, 32, 8, 32, 3, 1.0)
SEED = 14
SHOWN = ("tokens_per_s", "tpot_p50_ms", "tpot_p99_ms", "between_p99_ms", "gpu_busy_pct", "model_pct", "step_ms")
GAINS = (("tokens_per_s", 1), ("tpot_p50_ms", -1), ("tpot_p99_ms", -1), ("between_p99_ms", -1))


class Node:
    """The decode node: one state, one runner, one way to insert at a time."""

    def __init__(self, device: Any, state: SlotState, stepper: DecodeStepper, timed: Timed, shape: Shape) -> None:  # noqa: ANN401
        self.device, self.state, self.stepper, self.timed, self.shape = device, state, stepper, timed, shape
        self.inserting: Inserting = stepper.device

    @classmethod
    @contextmanager
    def opened(cls, *, small: bool) -> Iterator[Node]:
        """On the GPU that torch has chosen, on a stream of torch's that is not CUDA's default one; or on the cpu."""
        shape, config = (SMALL_LOAD, SMALL) if small else (Shape(), EIGHT_B)
        on_gpu = torch.cuda.is_available()
        index = torch.cuda.current_device() if on_gpu else 0
        if on_gpu:
            torch.cuda.set_stream(torch.cuda.Stream(index))
        sizes = StateConfig(shape.slots, shape.prompt + shape.longest, 16)
        decoder = Decoder.random(parse_config(config), "cuda" if on_gpu else "cpu", torch.bfloat16, SEED)
        with open_device("cuda" if on_gpu else "cpu", index=index) as device:
            state, blocks = device.state(sizes), shape.slots * sizes.max_blocks
            setup = RunnerSetup(device, state, blocks, Path(), "", decoder.config.vocab_size, ALONE)
            timed = Timed(
                TorchRunner(setup, decoder=decoder), (lambda: torch.cuda.Event(enable_timing=True)) if on_gpu else None
            )
            for cache in (*decoder.keys, *decoder.values):
                cache.normal_()
            sink = MemorySink(threaded=True)
            stepper = DecodeStepper(Inserting(device, state), state, timed, sink, blocks=blocks)  # type: ignore[arg-type]
            yield cls(device, state, stepper, timed, shape)
            sink.close(30.0)

    def request(self, arrival: Arrival) -> Request:
        """Its prompt's tokens are never fed: their keys and values are there."""
        prompt = np.random.default_rng(zlib.crc32(arrival.name.encode())).integers(8, 400, self.shape.prompt)
        return Request(arrival.name, prompt, SamplingParams(max_tokens=arrival.tokens, seed=SEED))

    def engine(self, *, overlap: bool) -> Engine:
        """An engine of a decode node, with all slots free."""
        limits = {"admit": self.stepper.admit, "overlap": overlap}
        return Engine([EngineWorker(self.stepper, DecodeScheduler(self.state.layout, self.stepper.blocks, **limits))])

    def run(self, way: str, load: Sequence[Arrival], seconds: float, *, overlap: bool) -> Run:
        """Serve the load for so long; the node is empty before and after."""
        requests = [self.request(arrival) for arrival in load]
        self.inserting.prepared = {
            one.request_id: inputs_of(self.state.layout, admit(one, self.state.layout)) for one in requests
        }
        engine, run = self.engine(overlap=overlap), Run(way, seconds)
        self.inserting.way = way
        self.inserting.times = []
        self.timed.milliseconds()
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        with undisturbed(), torch.no_grad(), watched(run, index):
            serve(engine, load, requests, run)
        run.inserted = self.inserting.times
        leave(engine, self.inserting, [one.request_id for one in requests])
        run.step_ms = self.timed.milliseconds()[: len(run.taken)]
        if engine.scheduler.preemptions:
            raise SystemExit(f"{engine.scheduler.preemptions} preemptions: there are too few blocks")
        self.stepper.sink.records.clear()  # type: ignore[attr-defined]
        return run

    def step_seconds(self) -> float:
        """Of a step with the usual number of slots busy, by the host's clock, overlapped."""
        shape = replace(self.shape, burst=0)
        load = [replace(one, tokens=shape.longest) for one in arrivals(shape, 1.0, 0.0, SEED)]
        run = self.run(HAL, load, 2.0 if torch.cuda.is_available() else 0.5, overlap=True)
        moments = np.array([at for at, _ in run.taken])
        return float(np.median(np.diff(moments[len(moments) // 4 :])))

    def check(self) -> list[str]:
        """Insert the same requests and blocks by every method, and compare the fields that a step reads. Return the
        differences."""
        names, count = [*self.state.layout.fields], min(5, self.shape.slots)
        requests = [self.request(Arrival(0.0, f"checked{number}", 20)) for number in range(count)]
        made = [admit(one, self.state.layout) for one in requests]
        self.inserting.prepared = {one.request_id: inputs_of(self.state.layout, one) for one in made}
        each = -(-(self.shape.prompt + 2) // 16)
        blocks = [list(range(at * each, at * each + each)) for at in range(count)]
        found: dict[str, dict[str, Any]] = {}
        wrong = []
        for way in WAYS if torch.cuda.is_available() else (HAL, PER_FIELD):
            self.inserting.way = way
            n, handed = count, [TaskKind.REMOTE_PREFILL] * count
            totals, zeros, first = [self.shape.prompt] * n, [0] * n, [FIRST_TOKEN] * n
            batch = TaskBatch(handed, range(n), made, totals, zeros, blocks, None, first)
            more = TaskBatch([TaskKind.MORE_BLOCKS], [1], made[1:2], [0], [0], [[count * each]], [each])
            for one in (batch, more):
                self.inserting.insert_tasks(state=self.state, tasks=one, stream=self.device.default_stream)
            found[way] = {name: self.state.tensor(name, "torch")[:count].clone().cpu() for name in names}
            wrong += [f"{way}: {name}" for name in names if not torch.equal(found[way][name], found[HAL][name])]
            self.state.release(range(count))
            plan = self.state.reset_plan()
            self.device.device.submit(plan, self.device.default_stream).wait()
        return wrong


def measure(
    seconds: float, rounds: int, *, overlap: bool, small: bool, step_ms: float = 0.0, first: int = 0
) -> dict[str, Any]:
    """Run all methods in turn, ``rounds`` times. ``step_ms``: step time for the rate of arrivals, instead of the
    measured one; ``first``: the method that begins."""
    began = time.perf_counter()
    with Node.opened(small=small) as node:
        if wrong := node.check():
            raise SystemExit(f"the ways write different things: {wrong}")
        step = node.step_seconds()
        load = arrivals(node.shape, step_ms / 1e3 or step, seconds, SEED)
        print(f"step {step * 1e3:.3f} ms, {len(load)} arrivals in {seconds:g} s; ready after "
              f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)  # fmt: skip
        ways = WAYS if torch.cuda.is_available() else (HAL, PER_FIELD)
        rows = []
        for number in range(rounds):
            for at in range(len(ways)):
                way = ways[(at + number + first) % len(ways)]
                rows.append({"round": number, **figures(node.run(way, load, seconds, overlap=overlap))})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    told = {"seconds": seconds, "rounds": rounds, "overlap": overlap, "calibrated_step_ms": step * 1e3}
    return told | {"arrivals_step_ms": step_ms or step * 1e3, "arrivals": len(load), "rows": rows}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What hal gains over each peer, by the medians of the rounds; none where that is below the rounds' spread."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        if way == HAL:
            continue
        for key, sign in GAINS:
            ours, theirs = (_levelled(rows, one, key) for one in (HAL, way))
            if not ours or not theirs:  # too short a run for that
                continue
            gain = sign * (float(np.median(ours)) / float(np.median(theirs)) - 1)
            spread = max((max(one) - min(one)) / float(np.median(one)) for one in (ours, theirs))
            said = f"{gain:+.2%}" if abs(gain) > spread else f"none ({gain:+.2%})"
            beside = f"spread of rounds {spread:.2%}" if len(ours) > 1 else "one round: its spread is not known"
            lines.append(f"  hal against {way:24} {key:16} {said:18} {beside}")
    return lines


def _levelled(rows: Sequence[dict[str, Any]], way: str, key: str) -> list[float]:
    """A way's figures, each GPU's by the median of what all ways had on it: two GPUs differ by more than two ways."""
    found = []
    for gpu in {row.get("gpu", 0) for row in rows}:
        here = [row for row in rows if row.get("gpu", 0) == gpu and row[key] is not None]
        level = float(np.median([row[key] for row in here])) if here else 0.0
        found += [row[key] / level for row in here if row["way"] == way]
    return found


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """The runs of several GPUs of one host, at once, as one."""
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    same = ("seconds", "overlap", "arrivals_step_ms", "arrivals")
    if any([part[key] for key in same] != [parts[0][key] for key in same] for part in parts):
        raise SystemExit(f"the files are not of the same runs: they differ in one of {', '.join(same)}")
    rows = [{"gpu": gpu, **row} for gpu, part in enumerate(parts) for row in part["rows"]]
    return parts[0] | {"rounds": sum(part["rounds"] for part in parts), "rows": rows, "parts": parts}


def table(found: dict[str, Any]) -> str:
    """As text: the medians of the rounds with their range, and the verdicts."""
    rows = found["rows"]
    head = f"{found['rounds']} rounds of {found['seconds']:g} s, overlap {'on' if found['overlap'] else 'off'}"
    lines = [f"decode node, {head}: medians of the rounds (least, most)"]
    for way in dict.fromkeys(row["way"] for row in rows):
        lines.append(f"  {way}")
        mine = [row for row in rows if row["way"] == way]
        for key in (*SHOWN, "running", "most_waiting", "insert_us", "insert_p99_us", "grow_us"):
            values = [row[key] for row in mine if row[key] is not None]
            if values:
                lines.append(f"    {key:16} {float(np.median(values)):11.3f}  ({min(values):g}, {max(values):g})")
    return "\n".join([*lines, *verdicts(rows)])


def main() -> int:
    """Measure, print the table, write ``gpu-endtoend.json`` and ``.txt``."""
    from .bench import facts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overlap", choices=("on", "off"), default="on")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    parser.add_argument("--name", default="gpu-endtoend")
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--join", type=Path, nargs="+", default=())
    chosen = parser.parse_args()
    if chosen.join:
        return told(joined(chosen.join), chosen.out, chosen.name)
    small = chosen.small or not torch.cuda.is_available()
    if torch.cuda.is_available():
        torch.cuda.set_device(chosen.device_index)
    overlap, more = chosen.overlap == "on", {"step_ms": chosen.step_ms, "first": chosen.first}
    found = {"facts": facts(), **measure(chosen.seconds, chosen.rounds, overlap=overlap, small=small, **more)}
    found["facts"]["command"] = f"python -m benchmarks.gpu.endtoend {' '.join(sys.argv[1:])}".strip()
    return told(found, chosen.out, chosen.name)


def told(found: dict[str, Any], out: Path, name: str) -> int:
    """Write the results, and print their table."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = f"{found['facts']['date']}  {found['facts']['gpus']}  {found['facts']['versions']}\n{table(found)}\n"
    (out / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
