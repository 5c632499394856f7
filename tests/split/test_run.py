"""``hal run --split``, in processes of its own: what it prints, and how it refuses."""

from __future__ import annotations

import contextlib
import json

import pytest

from hal.cli import main
from tests.commands import environment, left_in, start


def test_two_workers_print_what_one_does_and_leave_nothing(tmp_path, capsys):
    arguments = ("--prompt", "def main(", "--prompt", "import os", "--max-tokens", "12", "--json", "--logprobs", "1")
    drafted = ("--speculate", "mtp", "--chunk", "3")
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "cpu", *arguments])
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    process = start(tmp_path, "run", *arguments, *drafted, "--split", "1,1", env=environment(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    split = [json.loads(line) for line in out.splitlines()]
    for one, two in zip(alone, split, strict=True):
        assert (one["token_ids"], one["text"], one["device"]) == (two["token_ids"], two["text"], two["device"])
        for mine, its in zip(one["logprobs"], two["logprobs"], strict=True):
            assert its["logprob"] == pytest.approx(mine["logprob"], abs=1e-4)
        assert two["speculation"]["accepted"] > 0
    assert "split 1,1 of tp 1" in err
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--split", "1"], "--split: '1' (give the number of prefill and of decode workers, at least 1 each, as 1,1)"),
        (["--split", "0,1"], "--split: '0,1' (give the number of prefill and of decode workers"),
        (["--split", "1,1", "--dp", "2"], "--dp: 2 groups of ranks that do both (leave it out: --split P,D has as"),
        (["--split", "1,1", "--runner", "a:B"], "--runner: a:B (leave it out, or --split"),
        (["--split", "1,1", "--tp", "3"], "--tp: 3 ranks cannot share out num_attention_heads = 4"),
        (["--split", "1,1", "--sink", "sysv://?layout=plain"], "--sink: 'sysv://?layout=plain': its readers know a"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--prompt", "a", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
