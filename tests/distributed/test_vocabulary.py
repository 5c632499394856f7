"""A runner on ranks whose vocabulary is smaller than the checkpoint's: a prompt beyond it is refused, and no other."""

import json
from pathlib import Path

import pytest
from hal_core import FinishReason, HalError, Request, SamplingParams
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer

from hal.cli import main
from tests.split.test_refusals import Rank

from .rows import Pooled, Row

FOLDER = str(Path(__file__).parents[1] / "overlap")
SMALLER = 512
"""The vocabulary of the runner there."""


def prompts():
    """Three, of which the second has a token beyond the runner's vocabulary; that token."""
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))
    texts = ("aa", "def main(", "bb")
    (far,) = [max(ids) for ids in tokenizer.encode_all(texts) if max(ids) >= SMALLER]
    return texts, far


@pytest.mark.parametrize("way", ["--dp", "--tp"])
def test_only_a_prompt_beyond_the_runners_vocabulary_is_refused(way, worlds, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    how = ("raising", FOLDER, "1000")
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Pooled(worlds.of(size), how))
    monkeypatch.syspath_prepend(FOLDER)
    texts, far = prompts()
    given = [part for text in texts for part in ("--prompt", text)]
    runner = ("--runner", "failing:FailingRunner")
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--json", *runner, *given, "--temperature=0", "--max-tokens", "4", way, "2"])
    out, err = capsys.readouterr()
    assert end.value.code == 2, err
    first, second, third = (json.loads(line) for line in out.splitlines())
    assert second["finish_reason"] == "error"
    assert f"request 'r1': token {far} is outside the vocabulary of {SMALLER}" in second["message"]
    for answer in (first, third):
        assert (answer["finish_reason"], answer["token_ids"]) == ("length", [300] * 4)


@pytest.mark.parametrize("smaller", [0, 1], ids=["prefill", "decode"])
def test_a_split_refuses_what_either_role_has_no_token_for(smaller, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ranks = [Rank("heads", vocab_size=SMALLER if at == smaller else 1000) for at in range(2)]
    row = Row()
    engine = engine_of_ranks(
        row.setup(split=(1, 1)),
        lambda setup: RankExecutor(setup, ranks[setup.number]),
    )
    try:
        engine.submit(Request("far", (SMALLER,), SamplingParams(max_tokens=4)))
        (ended,) = engine.step()
        assert ended.reason is FinishReason.ERROR
        assert f"request 'far': token {SMALLER} is outside the vocabulary of {SMALLER}" in ended.message
        engine.submit(Request("near", (SMALLER - 1,), SamplingParams(max_tokens=4)))
        assert "near" in engine.front.split_requests
    finally:
        for worker in engine.workers:
            worker.refuse(HalError("the test is over"))
        engine.close()
