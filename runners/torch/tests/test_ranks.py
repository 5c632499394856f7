"""Ranks of the torch runner: what all of them raise ends one step's requests, a failed collective the group."""

import json
import re

import pytest
from hal_core import GroupLost

from hal.cli import main

torch = pytest.importorskip("torch")
from hal_torch import ranks  # noqa: E402

MARKED = "r1"
RUNNER = """
import hal_torch.model
from hal_core import ENTERING
from hal_torch.runner import TorchRunner

real, step = hal_torch.model.add_up, {"marked": False, "sums": 0}

def add_up(part):
    step["sums"] += 1
    if step["marked"] and step["sums"] == 4:
        raise MemoryError("no room in a layer")
    real(part)

hal_torch.model.add_up = add_up

class Raising(TorchRunner):
    def launch(self, state, planned, stream):
        tasks = planned.tasks
        entering = [one for kind, one in zip(tasks.plain["kinds"], tasks.requests) if kind in ENTERING]
        step.update(marked=any(one.request_id == "r1" for one in entering), sums=0)
        return super().launch(state, planned, stream)
"""


def test_a_sum_that_fails_is_a_loss(monkeypatch):
    """After it the ranks may have made different collectives, so they must not continue."""

    def fails(part):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ranks.distributed, "all_reduce", fails)
    with pytest.raises(GroupLost, match="torch's all-reduce failed: Connection closed by peer"):
        ranks.add_up(torch.zeros(1))


@pytest.mark.conform
def test_ranks_that_raise_between_two_sums_serve_the_other_requests(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "between.py").write_text(RUNNER)
    prompts = [part for text in ("def main(", "class Reader:", "x = ") for part in ("--prompt", text)]
    answers = {}
    for runner in ("torch", "between:Raising"):
        arguments = ["--runner", runner, "--device", "cpu", "--tp", "2", "--slots", "1", "--temperature=0", "--json"]
        with pytest.raises(SystemExit) as end:
            main(["run", *arguments, "--max-tokens", "6", *prompts])
        out, err = capsys.readouterr()
        assert end.value.code == (0 if runner == "torch" else 2), err
        answers[runner] = {answer["request_id"]: answer for answer in map(json.loads, out.splitlines())}
    for name, answer in answers["torch"].items():
        found = answers["between:Raising"][name]
        if name == MARKED:
            says = r"Raising\.launch raised MemoryError: no room in a layer \(\w+\.py:\d+\)"
            assert re.fullmatch(says, found["message"])
        else:
            assert found["token_ids"] == answer["token_ids"]
