"""Requests that move from one torch runner to another with the blocks of their cache (``--split``)."""

import dataclasses
import json

import numpy as np
import pytest
from hal_core import Request, SamplingParams, SplitRole, Task, TaskKind
from hal_engine.model.config import parse_config
from hal_engine.stepping import KeepsBlocks

from hal.cli import main
from tests.model.conftest import LLAMA, tensors, write

from .served import SIZES, by_torch, torch_stepper

torch = pytest.importorskip("torch")

PROMPT = [5, 9, 5, 9, 5, 9, 5, 11, 5]
COUNT = 3
"""Blocks of the prompt, of 4 tokens."""
WAYS = {
    "greedy": SamplingParams(max_tokens=8),
    "drawn, with penalties": SamplingParams(max_tokens=8, temperature=0.9, seed=3, frequency_penalty=0.6),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small random checkpoint."""
    return write(tmp_path_factory.mktemp("small"), LLAMA, tensors(parse_config(LLAMA)))


def moved(directory, params, drafts=0, dtype="float32"):
    """The tokens of a request that one runner prefills in pieces and another decodes, in blocks of other numbers."""
    sizes = dataclasses.replace(SIZES, max_draft_tokens=drafts)
    with torch_stepper(directory, sizes, 64, dtype) as prefill, torch_stepper(directory, sizes, 64, dtype) as decode:
        request = prefill.admit(Request("r", PROMPT, params, role=SplitRole.PREFILL))
        prefill.step([Task(TaskKind.PREFILL, 1, request, 0, 4, [7, 0, 5])])
        record = prefill.step([Task(TaskKind.PREFILL_CHUNK, 1, request, 4, len(PROMPT) - 4, first_block=COUNT)])
        assert isinstance(prefill.runner, KeepsBlocks)
        assert prefill.runner.cache.facts() == decode.runner.cache.facts()
        data = prefill.runner.cache.read([7, 0, 5])
        assert data.shape == (COUNT, prefill.runner.cache.block_bytes)
        mine = [1, 2, 60]
        decode.runner.cache.write(mine, data).wait()
        tokens = [int(record.tokens[0])]
        request = decode.admit(Request("r", PROMPT, params, role=SplitRole.DECODE))
        task = Task(TaskKind.REMOTE_PREFILL, 0, request, len(PROMPT), 0, [*mine, 61, 3], first_token=tokens[0])
        tasks = [task]
        while decode.state.host_table.requests[0] is not None or tasks:
            tokens += decode.step(tasks).tokens.tolist()
            tasks = []
        return tokens, decode.acceptance


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_goes_on_with_its_blocks_as_it_would_have(small, params, drafts):
    expected = by_torch(small, [Request("r", PROMPT, params)])["r"].tokens
    assert len(expected) == 8
    found, acceptance = moved(small, params, drafts)
    assert found == expected
    assert bool(acceptance.drafted) is bool(drafts)


def test_bfloat16_blocks_move_as_they_are(tmp_path):
    half = write(tmp_path, LLAMA, tensors(parse_config(LLAMA)), dtype="bfloat16")
    tokens, _ = moved(half, WAYS["greedy"], dtype="auto")
    assert tokens == by_torch(half, [Request("r", PROMPT, WAYS["greedy"])], dtype="auto")["r"].tokens


def test_what_is_read_is_what_was_written(small):
    with torch_stepper(small) as stepper:
        cache = stepper.runner.cache
        data = np.random.default_rng(3).integers(0, 256, (3, cache.block_bytes), np.uint8)
        kept, before = data.copy(), cache.read([0, 8])
        at = np.empty(data.size + 1, np.uint8)[1:].reshape(data.shape)  # those of a message may begin anywhere
        at[:] = data
        cache.write([4, 9, 2], at).wait()
        at[:] = 0
        assert np.array_equal(cache.read([9, 2, 4]), kept[[1, 2, 0]])
        assert np.array_equal(cache.read([0, 8]), before), "another block was written"
        assert cache.blocks * cache.block_bytes == sum(one[:-2].nbytes for one in stepper.runner.decoder.keys) * 2


@pytest.mark.conform
@pytest.mark.parametrize("more", [(), ("--drafts", "3")], ids=["plain", "drafts"])
def test_the_command_gives_the_tokens_of_one_worker(capfd, monkeypatch, tmp_path, more):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["run", "--device", "cpu", "--runner", "torch", "--dtype", "float32", "--max-tokens", "20", "--json", "-v"]
    words += ["--chunk", "3", "--prompt", "def main(", "--prompt", "import os"]
    answers = []
    for options in ((), ("--split", "1,1", *more)):
        with pytest.raises(SystemExit) as end:
            main([*words, *options])
        out, err = capfd.readouterr()
        assert end.value.code in (0, None), err
        answers.append([json.loads(line)["token_ids"] for line in out.splitlines()])
    assert answers[0] == answers[1]
    assert "runner torch, split 1,1" in err
    assert ("drafts accepted" in err) is bool(more)
