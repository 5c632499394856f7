"""Differences in meaning between FastDeploy's share_inputs and hal's state: each line of the page's table."""

import re
from pathlib import Path

import numpy as np
import pytest
from hal_core import Request, SamplingParams, SplitRole, StateConfig, Task, TaskKind
from hal_core.devices.cpu.device import host_view
from hal_core.errors import InvalidBatch
from hal_core.slots.fields import STATE_TABLE

import hal

from . import upstream as up

PAGE = (Path(__file__).parents[3] / "docs/fastdeploy.md").read_text(encoding="utf-8")
CASES = {}


class Theirs:
    """The reference writer over arrays."""

    def __init__(self, method="", role="mixed"):
        self.runner = up.runner_of(up.target_arrays("naive"), method=method, role=role)
        self.inputs = self.runner.share_inputs

    def enter(self, prompt, output=(), piece=None, blocks=(3, 4), **values):
        start, end = piece or (0, len(prompt) + len(output))
        given = {"prompt_token_ids": list(prompt), "output_token_ids": list(output), "block_tables": list(blocks)}
        given |= {"prefill_start_index": start, "prefill_end_index": end, "eos_token_ids": values.pop("eos", [2, 5])}
        given |= {"draft_token_ids": [30, 31], "values": values}
        up.insert(self.runner, [up.Request(up.PREFILL, 1, "r", **given)], 4)

    def other(self, kind, **given):
        up.insert(self.runner, [up.Request(kind, 1, "r", **given)], 4)

    def __getitem__(self, name):
        return np.atleast_1d(self.inputs[name][1]).tolist()


class Ours:
    """hal's state on the cpu device."""

    def __init__(self, device):
        self.device = device
        self.state = device.state(StateConfig(num_slots=4, max_model_len=24, block_size=4, max_draft_tokens=3))

    def do(self, kind, **given):
        task = Task(kind, 1, self.request, **given)
        self.device.insert_tasks(state=self.state, tasks=[task], stream=self.device.default_stream).wait()

    def enter(self, prompt, output=(), length=None, params=None, blocks=(3, 4), name="r"):
        params = params or SamplingParams(max_tokens=9, temperature=0.5)
        self.request = self.state.admit(Request(name, list(prompt), params, list(output)))
        self.do(TaskKind.PREFILL, num_scheduled_tokens=length or self.request.total, blocks=blocks)

    def poke(self, name, value):
        host_view(self.state.view(name))[1] = value

    def __getitem__(self, name):
        return host_view(self.state.view(name))[1].tolist()


def case(line):
    """Register the test of a line of the table, by the line's first cell."""

    def register(test):
        CASES[line] = test
        return test

    return register


@case("next chunk")
def next_chunk(theirs, ours):
    """A kernel of theirs stops the slot after a chunk and zeroes its lengths."""
    theirs.enter(range(8), piece=(0, 4))
    theirs.inputs["stop_flags"][1], theirs.inputs["seq_lens_decoder"][1] = True, 0
    theirs.enter(range(8), piece=(4, 8))
    assert (theirs["stop_flags"], theirs["seq_lens_decoder"]) == ([False], [4])
    ours.enter(range(8), length=4)
    ours.poke("stop_flags", True)
    ours.poke("seq_lens_decoder", 0)
    ours.do(TaskKind.PREFILL_CHUNK, num_computed_tokens=4, num_scheduled_tokens=4, first_block=2)
    assert (ours["stop_flags"], ours["seq_lens_decoder"]) == ([True], [0])


@case("leaving")
def leaving(theirs, ours):
    theirs.enter(range(6), temperature=0.5)
    theirs.other(up.PREEMPTED)
    assert (theirs["block_tables"], theirs["temperature"], theirs["prompt_lens"]) == ([-1] * 6, [0.5], [6])
    ours.enter(range(6))
    ours.do(TaskKind.PREEMPTED)
    assert (ours["block_tables"][:2], ours["temperature"], ours["prompt_lens"]) == ([3, 4], [0.0], [0])


@case("tokens of before")
def tokens_of_before(theirs, ours):
    """Other kernels have appended tokens that no step of hal has booked."""
    theirs.enter(range(6))
    theirs.inputs["token_ids_all"][1, 6:9] = 7
    theirs.enter([4, 5])
    assert theirs["token_ids_all"][:10] == [4, 5, *[-1] * 8]
    ours.enter(range(6))
    ours.poke("token_ids", [*range(6), 7, 7, 7, *[-1] * 15])
    ours.state.release([1])
    ours.enter([4, 5], name="s")
    assert ours["token_ids"][:10] == [4, 5, *[-1] * 4, 7, 7, 7, -1]


@case("what a step wrote")
def what_a_step_wrote(theirs, ours):
    assert not {"accept_tokens", "accept_num", "next_tokens", "sampled_token_ids"} & theirs.inputs.data.keys()
    ours.poke("accept_tokens", 9)
    ours.poke("next_tokens", 9)
    ours.enter(range(3))
    assert (ours["accept_tokens"], ours["next_tokens"]) == ([-1] * 4, [-1])


@case("empty slot")
def empty_slot(theirs, ours):
    names = ("temperature", "top_p", "max_dec_len")
    assert [round(theirs[name][0], 2) for name in names] == [0.95, 0.7, 24]
    assert theirs["bad_tokens_len"] == [1]
    assert [ours[name] for name in (*names, "bad_words_num")] == [[0.0], [1.0], [0], [0]]


@case("resumed")
def resumed(theirs, ours):
    theirs.enter(range(6), [8, 9], piece=(0, 4))
    assert (theirs["prompt_lens"], theirs["step_idx"]) == ([8], [0])
    ours.enter(range(6), [8, 9], length=4)
    assert (ours["prompt_lens"], ours["step_idx"]) == ([6], [2])


@case("more blocks")
def more_blocks(theirs, ours):
    theirs.enter(range(6))
    theirs.other(up.DECODE, block_tables=[9])
    assert theirs["block_tables"] == [9, *[-1] * 5]
    ours.enter(range(6))
    ours.do(TaskKind.MORE_BLOCKS, blocks=[9], first_block=2)
    assert ours["block_tables"][:3] == [3, 4, 9]
    with pytest.raises(InvalidBatch, match="blocks begin at entry 0, but 3 are in use"):
        ours.do(TaskKind.MORE_BLOCKS, blocks=[9], first_block=0)


@case("end of a request")
def end_of_a_request(theirs, ours):
    theirs.enter(range(6))
    theirs.enter([1, 2])
    assert theirs["prompt_lens"] == [2]
    ours.enter(range(6))
    with pytest.raises(InvalidBatch, match="still holds 'r'; release"):
        ours.enter([1, 2], name="s")
    ours.state.release([1])
    ours.enter([1, 2], name="s")


@case("blocked slot")
def blocked_slot(theirs, ours):
    theirs.inputs["is_block_step"][1] = True
    theirs.enter(range(3))
    assert theirs["is_block_step"] == [False]
    assert not {field.name for field in STATE_TABLE} & {"is_block_step", "step_seq_lens_decoder"}


@case("seed")
def seed(theirs, ours):
    theirs.enter(range(3), seed=7)
    assert theirs["infer_seed"] == [7]
    ours.enter(range(3), params=SamplingParams(seed=7))
    first = ours["seed"]
    ours.state.release([1])
    ours.enter(range(3), params=SamplingParams(seed=7), name="another")
    assert first != [7] != ours["seed"] != first


@case("end tokens")
def end_tokens(theirs, ours):
    theirs.enter(range(3), eos=[2, 5])
    assert theirs.inputs["eos_token_id"].tolist() == [[2], [5]]
    ours.enter(range(3), params=SamplingParams(eos_token_ids=(2, 5)))
    assert (ours["eos_num"], ours["eos_token_ids"][:2]) == ([2], [2, 5])


@case("drafts of the decode role")
def drafts(theirs, ours):
    decode = Theirs("mtp", "decode")
    decode.runner.spec_method = "naive"
    decode.enter(range(6), [30], (6, 7))
    assert decode["draft_tokens"][:2] == [30, 31], "column 0 is the first token"
    ours.request = ours.state.admit(Request("r", [*range(6)], SamplingParams(max_tokens=9), role=SplitRole.DECODE))
    ours.do(TaskKind.REMOTE_PREFILL, num_computed_tokens=6, blocks=(3, 4), first_token=30, drafts=(31,))
    assert (ours["next_tokens"], ours["draft_tokens"], ours["draft_num"]) == ([30], [31, -1, -1], [1])


@pytest.mark.parametrize("line", CASES)
def test_a_line_of_the_table_is_what_both_sides_do(line):
    with hal.open_device("cpu") as device:
        CASES[line](Theirs(), Ours(device))


def test_the_page_has_every_line_that_is_run_and_no_other():
    table = PAGE.partition("## Differences in meaning")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", table, re.M) == ["case", *CASES]
