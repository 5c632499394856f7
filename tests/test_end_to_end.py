"""The embedded checkpoint through engine, worker and hooks: the same tokens however the work is divided.

Sums differ in the last bits between batch sizes, so equality holds where the choice was not that close: on the fixed
prompts the reference's margins are asserted first, the drawn ones are compared up to the first small margin.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_engine.engine import Engine, Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.tokenizer import Tokenizer
from hal_paddle_runner import llama
from hal_paddle_runner.llama import LlamaModel
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.runner import ModelRunner
from hal_paddle_runner.worker import Worker

from tests import share
from tests.model.reference import Reference

MARGIN, TOKENS, ALTERNATIVES = 1e-3, 32, 3
GREEDY = ("def main(", "for i in range(", "try:\n    ", "if __name__ ==", "from collections import", "with open(")
SEEDED = (("with open(", 1), ("from collections import", 1), ("if __name__ ==", 0), ("raise ValueError(", 1))
DRAWN = 22
DRAW = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}


class Watched(ModelRunner):
    """Records how far each choice was from a different one: request id to margins, in the order of its tokens."""

    def _write(self, tokens):
        for slot, margin in zip(tokens.slots.tolist(), tokens.margins.tolist(), strict=True):
            self.margins[self.state.host_table.requests[slot].request_id].append(margin)
        super()._write(tokens)


class WatchedWorker(Worker):
    runner_type = Watched


@dataclass
class Run:
    """The output, by request id, in the order of the tokens."""

    tokens: dict[str, tuple[int, ...]]
    margins: dict[str, list[float]]
    preemptions: int
    most_running: int
    logprobs: dict[str, list[tuple[list[int], list[float]]]] = field(default_factory=lambda: defaultdict(list))


@pytest.fixture(scope="module")
def model():
    return load_model(DEFAULT_CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.load(DEFAULT_CHECKPOINT, model.config)


@pytest.fixture(scope="module")
def requests(model, tokenizer):
    """Fixed prompts, greedy and seeded, and drawn ones: pieces of the standard library, every second one seeded."""
    common = {"max_tokens": TOKENS, "eos_token_ids": model.config.eos_token_ids, "logprobs": ALTERNATIVES}
    found = [Request(f"greedy {text!r}", tokenizer.encode(text), SamplingParams(**common)) for text in GREEDY]
    found += [
        Request(f"seeded {text!r}", tokenizer.encode(text), SamplingParams(seed=seed, **DRAW, **common))
        for text, seed in SEEDED
    ]
    tokens, rng = tokenizer.encode(inspect.getsource(textwrap)), np.random.default_rng(7)
    for number in range(DRAWN):
        begin, length = int(rng.integers(0, len(tokens) - 60)), int(rng.integers(1, 60))
        draw = {**DRAW, "seed": number} if number % 2 else {}
        params = SamplingParams(**draw, **{**common, "max_tokens": 12})
        found.append(Request(f"drawn {number}", tokens[begin : begin + length], params))
    return found


def generate(model, requests, *, slots, chunk=4096, blocks=400) -> Run:
    sink = MemorySink()
    with bind(CpuPlugin.open(0, {})) as device:
        sizes = StateConfig(
            num_slots=slots, max_model_len=model.config.max_position_embeddings, max_logprobs=ALTERNATIVES
        )
        worker = WatchedWorker(device, model, sizes, blocks, sink)
        worker.runner.margins = defaultdict(list)
        engine = Engine(worker, Limits(chunk=chunk))
        for request in requests:
            engine.submit(request)
        tokens = {finished.request_id: finished.token_ids for finished in engine.run()}
    run = Run(tokens, worker.runner.margins, engine.scheduler.preemptions, engine.scheduler.most_running)
    for record in sink.records:
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                run.logprobs[row.request_id].append((row.logprob_token_ids[0].tolist(), row.logprobs[0].tolist()))
    return run


@pytest.fixture(scope="module")
def reference(model, requests):
    """One slot, whole prompts, blocks for all requests."""
    return generate(model, requests, slots=1)


WAYS = {
    "32 slots": {"slots": 32},
    "32 slots, prompts in pieces": {"slots": 32, "chunk": 41},
    "4 slots, small pieces": {"slots": 4, "chunk": 7},
    "32 slots, too few blocks": {"slots": 32, "blocks": 24},
    "too few blocks, pieces": {"slots": 8, "blocks": 9, "chunk": 11},
    "a CPU without AVX-512": {"slots": 32, "chunk": 41},
}


HERE = ("32 slots, prompts in pieces", "too few blocks, pieces", "a CPU without AVX-512")
"""In ``make test``; the remaining ones in ``make conform``."""


@pytest.fixture(scope="module", params=share.cases(WAYS, HERE.__contains__))
def other(request, model, requests):
    options = WAYS[request.param]
    if request.param == "a CPU without AVX-512":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "processor_features", lambda: frozenset({"SSE2", "AVX2"}))
            model = LlamaModel.load(DEFAULT_CHECKPOINT)
    run = generate(model, requests, **options)
    if "blocks" in options:
        assert run.preemptions > 0, "this way should have met preemptions"
    else:
        assert run.preemptions == 0
        assert run.most_running >= options["slots"] // 2
    assert run.most_running == options["slots"] or options.keys() != {"slots"}
    return run


@pytest.fixture(scope="module")
def dense():
    """Log-probabilities after each token of a sequence, by a plain dense pass."""

    model = Reference(DEFAULT_CHECKPOINT)

    @functools.cache
    def logs(sequence):
        logits = model.logits(sequence)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    return logs


@pytest.mark.conform
def test_the_reference_is_clear_about_the_fixed_prompts(reference, requests):
    for request in requests[:-DRAWN]:
        least = min(reference.margins[request.request_id])
        assert least >= MARGIN, f"{request.request_id}: margin {least:.1e}; choose another fixed prompt or seed"
        assert len(reference.tokens[request.request_id]) == TOKENS


def test_fixed_prompts_give_the_same_tokens_every_way(reference, other, requests):
    for request in requests[:-DRAWN]:
        assert other.tokens[request.request_id] == reference.tokens[request.request_id], request.request_id


def test_drawn_prompts_give_the_same_tokens_up_to_the_first_close_choice(reference, other, requests):
    compared = 0
    for request in requests[-DRAWN:]:
        clear = [margin >= MARGIN for margin in reference.margins[request.request_id]]
        upto = clear.index(False) if False in clear else len(clear)
        assert other.tokens[request.request_id][:upto] == reference.tokens[request.request_id][:upto]
        compared += upto
    assert compared > DRAWN * 6, "nearly everything was too close to compare"


def test_log_probabilities_are_those_of_a_plain_dense_pass(dense, reference, other, requests):
    """Of ``tests/model/reference.py``: no cache, no pages, no batch; NumPy throughout."""
    for run in (reference, other):
        for request in requests[::5]:
            tokens, prompt = run.tokens[request.request_id], tuple(request.prompt)
            logs = dense(prompt + tokens)[len(prompt) - 1 : -1]
            logprobs = run.logprobs[request.request_id]
            assert [ids[0] for ids, _ in logprobs] == list(tokens)
            for position, (ids, values) in enumerate(logprobs):
                np.testing.assert_allclose(values, logs[position, ids], atol=1e-4)
                best = np.sort(logs[position])[::-1][:ALTERNATIVES]
                np.testing.assert_allclose(values[1:], best, atol=1e-4)


def test_the_default_writes_plausible_python(model, tokenizer, reference):
    text = tokenizer.decode(reference.tokens["greedy 'def main('"])
    assert ")" in text
    assert ":" in text
    assert "\n    " in text
