"""The prepared calls against Paddle's operators, and where they cannot be: the operators, with a note."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_paddle_runner import onednn, prepared
from hal_paddle_runner.batch import ModelBatch, padded
from hal_paddle_runner.host import HostModel
from hal_paddle_runner.llama import LlamaModel
from hal_paddle_runner.loading import load_model

SIZE, WIDTH = 16, 12


def logs(logits):
    """Log-probabilities."""
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture
def both():
    """The embedded model by prepared calls and by operators, each with a cache."""
    found = [form.load(DEFAULT_CHECKPOINT) for form in (HostModel, LlamaModel)]
    for model in found:
        model.allocate_cache(8 * WIDTH, SIZE)
    return found


class Sequences:
    """Sequences of drawn tokens that run in both models, which must agree."""

    def __init__(self, both, lengths, rng):
        self.both, self.rng = both, rng
        self.ids = [rng.integers(0, 2048, length).tolist() for length in lengths]
        self.done = [0] * len(lengths)
        self.tables = rng.permutation(8 * WIDTH)[: len(lengths) * WIDTH].reshape(-1, WIDTH).astype(np.int32)

    def step(self, counts):
        """Run so many further tokens of each sequence, by its number; return the best tokens."""
        parts = {number: self.ids[number][self.done[number] :][:count] for number, count in counts.items()}
        starts = [self.done[number] for number in parts]
        lengths = np.array([len(part) for part in parts.values()], np.int32)
        most = max(start + length for start, length in zip(starts, lengths, strict=True))
        batch = ModelBatch(
            np.concatenate([*parts.values()]).astype(np.int64),
            np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]),
            lengths,
            np.array(starts, np.int32),
            self.tables[list(parts), : -(-most // SIZE)],
        )
        got, expected = (logs(model.forward(batch)) for model in self.both)
        np.testing.assert_allclose(got, expected, atol=1e-4)
        best = expected.argmax(-1)
        np.testing.assert_array_equal(got.argmax(-1), best)
        for number, length in zip(parts, lengths, strict=True):
            self.done[number] += int(length)
        return best.tolist()


def test_prompts_in_pieces_beside_decoding_rows_give_the_same(both):
    """Rows of one token, of a few and of many in one step, then all decode across several blocks, and some leave."""
    rng = np.random.default_rng(3)
    rows = Sequences(both, [1, 5, 40, 70, 17, 33], rng)
    while left := {n: int(rng.integers(1, 45)) for n, ids in enumerate(rows.ids) if rows.done[n] < len(ids)}:
        for number, token in zip(left, rows.step(left), strict=True):
            if rows.done[number] == len(rows.ids[number]) and number < 2:
                rows.ids[number].append(token)  # the short ones decode beside the prompts
        if all(rows.done[n] >= len(rows.ids[n]) - 1 for n in left) and len(rows.ids[0]) > 20:
            break
    for step in range(50):
        running = range(6) if step < 30 else range(0, 6, 2)
        for number in running:
            rows.ids[number] = [*rows.ids[number][: rows.done[number]], int(rng.integers(0, 2048))]
        rows.step(dict.fromkeys(running, 1))
    assert both[0].decoder.steps > 50


@pytest.mark.parametrize("fails", ["missing", "another version", "slow"])
def test_without_the_library_or_its_kernels_the_operators_run_with_a_note(monkeypatch, tmp_path, both, fails):
    note = "no usable libdnnl.so.3"
    if fails == "missing":
        monkeypatch.setattr(prepared, "library_path", lambda: Path(tmp_path / "libdnnl.so.3"))
    elif fails == "another version":
        monkeypatch.setattr(onednn, "MAJOR", 4)
        note = "of version 3, not 4"
    else:
        product, note = onednn.OneDnn.product, "reference code for them on this CPU (ref:any)"

        def slow(self, *arguments):
            self.names.add("ref:any")
            return product(self, *arguments)

        monkeypatch.setattr(onednn.OneDnn, "product", slow)
    model = load_model(DEFAULT_CHECKPOINT)
    assert type(model) is LlamaModel
    assert note in model.note
    assert "Paddle's operators" in model.note
    model.allocate_cache(8 * WIDTH, SIZE)
    Sequences([model, both[1]], [20], np.random.default_rng(1)).step({0: 20})


def test_a_model_elsewhere_than_in_host_memory_runs_the_operators(monkeypatch):
    monkeypatch.setattr("hal_paddle_runner.loading.HOST_PLACE", "elsewhere")
    assert type(load_model(DEFAULT_CHECKPOINT, place="cpu")) is LlamaModel


IN_HOST_MEMORY = """
import sys
from hal.cli import main
sys.argv = ["hal", "run", "x", "--device=cpu", "--max-tokens=2", "--speculate=mtp", "--temperature=0"]
try:
    main()
finally:
    print([name for name in sys.modules if name.partition(".")[0] == "paddle"])
"""


def test_a_command_imports_no_paddle():
    """Its import takes as long as the rest of the start, and three quarters of the memory."""
    done = subprocess.run([sys.executable, "-c", IN_HOST_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


THREADS = """
import os, threading
import numpy as np
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_paddle_runner.batch import ModelBatch
from hal_paddle_runner.loading import load_model
before = len(os.listdir("/proc/self/task"))
model, none = load_model(DEFAULT_CHECKPOINT), np.zeros(1, np.int32)
model.allocate_cache(8, 16)
batch = ModelBatch(np.arange(64), np.arange(64), np.array([64], np.int32), none, np.arange(4, dtype=np.int32)[None])
threads = []
def forward():
    model.forward(batch)
    threads.append(len(os.listdir("/proc/self/task")) - before)
forward()
thread = threading.Thread(target=forward)
thread.start()
thread.join()
print(*threads)
"""


@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor")
@pytest.mark.parametrize(("chosen", "more"), [({}, "0 1"), ({"OMP_NUM_THREADS": "3"}, "2 5")])
def test_a_step_has_no_threads_but_those_that_are_asked_for(chosen, more):
    """In the first thread that computes, and then in a second one."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.check_output([sys.executable, "-c", THREADS], env=kept | chosen, text=True)
    assert found.strip() == more


def test_classes_are_little_larger_and_few():
    classes = [padded(count) for count in range(1, 5000)]
    assert sorted({*classes[:64]}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(count <= found < (1.5 if count < 65 else 1.25) * count for count, found in enumerate(classes, 1))
    assert classes == sorted(classes)
    assert [padded(found) for found in classes] == classes


def test_classes_of_decode_steps_are_made_before_the_first_one(both, monkeypatch):
    model = both[0]
    model.prepare(32)
    assert "10 of 10 classes" in model.note
    monkeypatch.setattr(prepared, "MOST_KEPT", 3)
    model.prepare(32)
    assert "3 of 10 classes" in model.note, "it takes no longer than it may"


def test_logits_and_hidden_states_are_the_callers_own(both):
    model = both[0]
    first = ModelBatch(
        np.array([5, 6]), np.arange(2), np.array([2], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    )
    kept = model.forward_with_hidden(first)
    before = [array.copy() for array in kept]
    model.forward(
        ModelBatch(
            np.array([9]), np.array([2]), np.ones(1, np.int32), np.array([2], np.int32), np.zeros((1, 1), np.int32)
        )
    )
    for array, copy in zip(kept, before, strict=True):
        np.testing.assert_array_equal(array, copy)
