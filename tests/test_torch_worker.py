"""``examples/torch_worker``: its draw against ``hal.sampling``, with NumPy in torch's place; the recorded tokens; and,
where torch is, the whole runner on the cpu device."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import MemorySink, Request, SamplingParams, SlotStatus, StateConfig

from hal import open_device
from hal.engine import Engine
from hal.model import DEFAULT_CHECKPOINT
from hal.sampling import SamplingRows, sample
from hal.sampling.philox import uniform

FOLDER = Path(__file__).parents[1] / "examples" / "torch_worker"
RECORDED = json.loads((FOLDER / "tokens.json").read_text())
LINES = 500


class Stand(np.ndarray):
    """A NumPy array with the methods of a tensor that the draw uses."""

    def double(self):
        return self.astype(np.float64)

    def long(self):
        return self.astype(np.int64)

    def amax(self, axis, keepdim=False):
        return np.max(self, axis, keepdims=keepdim)

    def gather(self, axis, index):
        return np.take_along_axis(self, index, axis)

    def scatter(self, axis, index, values):
        made = self.copy()
        np.put_along_axis(made, index, values, axis)
        return made


def standing(function):
    return lambda *arguments: np.asarray(function(*arguments)).view(Stand)


def ordered(x, dim, descending, stable):
    assert (dim, descending, stable) == (1, True, True)
    return SimpleNamespace(indices=np.argsort(-x, axis=1, kind="stable").view(Stand))


@pytest.fixture
def sampling(monkeypatch):
    """The example's sampling, on the stand-in."""
    named = ("zeros_like", "where", "isfinite", "exp", "round", "ceil", "minimum", "nan_to_num")
    names = {name: standing(getattr(np, name)) for name in named}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Stand, sort=ordered, **names))
    spec = spec_from_file_location("example_sampling", FOLDER / "hal_example_torch" / "sampling.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_rows(count, vocab, seed):
    """Logits with equal ones among them, and how each row is drawn from."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-40, 40, (count, vocab)) / 8).astype(np.float32)
    temperature = rng.choice([0, 0.3, 1, 2], count).astype(np.float32)
    top_p = rng.choice([0.05, 0.5, 0.9, 1], count).astype(np.float32)
    seeds = rng.integers(-(2**63), 2**63 - 1, count)
    return logits, {
        "temperature": temperature,
        "top_p": top_p,
        "seed": seeds,
        "step_idx": rng.integers(0, 2**40, count),
    }


def expected(logits, rows):
    """What ``hal.sampling`` draws of the same."""
    count = len(logits)
    ints, lists, one = np.zeros(count, np.int32), np.zeros((count, 1), np.int64), np.ones(count, np.float32)
    penalties = (one, 0 * one, 0 * one, ints.astype(np.int64))
    ends = (lists, ints, lists, lists.astype(np.int32), ints, lists, ints)
    drawn = (rows["temperature"], ints, rows["top_p"], 0 * one, rows["seed"], rows["step_idx"])
    return sample(logits, SamplingRows(*drawn, *penalties, *ends, None, None), logprobs=None).tokens


def test_uniform_numbers_are_those_of_the_cpu_device(sampling):
    _, rows = drawn_rows(500, 2, 1)
    given = sampling.uniform(rows["seed"].view(Stand), rows["step_idx"].view(Stand))
    assert given.tolist() == uniform(rows["seed"], rows["step_idx"]).tolist()


@pytest.mark.parametrize("vocab", [3, 700])
def test_draws_are_those_of_the_cpu_device(sampling, vocab):
    logits, rows = drawn_rows(400, vocab, vocab)
    placed = {name: values.view(Stand) for name, values in rows.items()}
    given = sampling.sample(logits.view(Stand), sampling.TRUNCATED, placed)
    assert given.tolist() == expected(logits, rows).tolist()
    whole = rows | {"top_p": np.ones(400, np.float32)}
    given = sampling.sample(logits.view(Stand), sampling.DRAWN, placed)
    assert given.tolist() == expected(logits, whole).tolist()
    best = rows | {"temperature": np.zeros(400, np.float32)}
    given = sampling.sample(logits.view(Stand), sampling.GREEDY, placed)
    assert given.tolist() == expected(logits, best).tolist()


def test_logits_that_are_no_use_give_no_token(sampling):
    logits, rows = drawn_rows(4, 9, 3)
    logits[0, 2], logits[1, 8], logits[2] = np.nan, np.inf, -np.inf
    given = sampling.sample(logits.view(Stand), sampling.TRUNCATED, {n: v.view(Stand) for n, v in rows.items()})
    assert given[:3].tolist() == [-1, -1, -1]
    assert given[3] >= 0


def test_the_recorded_tokens_are_those_of_the_cpu_device():
    pytest.importorskip("paddle")
    from hal.model.llama import LlamaModel
    from hal.worker import Worker

    ways = {json.dumps({k: v for k, v in row["params"].items() if k != "seed"}): row for row in RECORDED}
    sizes, sink = StateConfig(4, 128, 16, max_logprobs=0), MemorySink()
    with open_device("cpu") as device:
        engine = Engine(Worker(device, LlamaModel.load(DEFAULT_CHECKPOINT), sizes, 32, sink))
        for row in ways.values():
            engine.submit(Request(row["request_id"], row["prompt"], SamplingParams(**row["params"])))
        ended = {one.request_id: list(one.token_ids) for one in engine.run()}
    assert len(ways) == 4
    assert ended == {row["request_id"]: row["tokens"] for row in ways.values()}
    assert all(row["margin"] >= 1e-3 for row in RECORDED)
    assert all(row.status is SlotStatus.TOKEN for record in sink.records for row in record.rows())


def test_it_is_a_package_of_few_lines():
    told = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    assert told["name"] == "hal-example-torch"
    left_out = ("__init__.py", "kernel.py")  # the second: Triton, beside model, loading, sampling and capture
    files = [file for file in (FOLDER / "hal_example_torch").glob("*.py") if file.name not in left_out]
    assert sum(len(file.read_text().splitlines()) for file in files) <= LINES


@pytest.mark.parametrize("stage", ["sampling", "tokens", "refused", "useless", "command", "ranks"])
def test_on_the_cpu_device(stage):
    """Where torch is: the stages of ``check.py``, each in a process of its own."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [sys.executable, "check.py", "--device", "cpu", "--only", stage]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
