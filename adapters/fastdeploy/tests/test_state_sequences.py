"""Drawn sequences over hal's own state against FastDeploy's reference, with the page's table of differences applied."""

import random

import numpy as np
import pytest
from hal_core import Request, SamplingParams, SplitRole, StateConfig, Task, TaskKind
from hal_core.memory.views import ByteRange

import hal
from tests import share

from . import upstream as up

SEQUENCES = 400
SAME = {  # hal's field: FastDeploy's tensor of the same meaning
    "stop_flags": "stop_flags",
    "seq_lens_decoder": "seq_lens_decoder",
    "seq_lens_encoder": "seq_lens_encoder",
    "seq_lens_this_time": "seq_lens_this_time_buffer",
    "blocks_num": "encoder_block_lens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_score",
    "frequency_penalty": "frequency_score",
    "presence_penalty": "presence_score",
    "min_dec_len": "min_dec_len",
    "max_dec_len": "max_dec_len",
}
OTHERWISE = ("prompt_lens", "step_idx", "token_ids", "eos_num", "eos_token_ids", "bad_words_num", "bad_words")
OTHERWISE += ("stop_seqs_num", "stop_seqs_len", "block_tables", "next_tokens", "draft_num", "draft_tokens")
EMPTY = {"temperature": 0, "top_p": 1, "prompt_lens": 0, "step_idx": 0, "max_dec_len": 0, "eos_num": 0}


class Both:
    """hal's state on a device, FastDeploy's arrays, and the requests in the slots: name, prompt, output, next token."""

    def __init__(self, bound, draw):
        self.bound, self.draw = bound, draw
        self.role = draw.choice(["mixed", "decode"])
        sizes = StateConfig(num_slots=4, max_model_len=24, block_size=4, max_draft_tokens=3)
        self.state = bound.state(sizes)
        self.theirs = up.runner_of(up.target_arrays("naive"), method="naive", role=self.role)
        self.held, self.left, self.gone, self.count = {}, {}, set(), 0

    def act(self):
        """One task for some slots, on both sides."""
        tasks, requests = [], []
        for slot in self.draw.sample(range(4), self.draw.randrange(1, 4)):
            held = self.held.get(slot)
            kinds = ["enter"]
            if held:
                leaving = [] if slot in self.gone else ["preempt", "abort"]  # once: no output reports it in between
                kinds = ["chunk"] if held["next"] < held["end"] else ["enter"]
                kinds += leaving + (["blocks"] if len(held["blocks"]) < 6 and kinds == ["enter"] else [])
            kind = self.draw.choice(kinds)
            task, request = getattr(self, f"_{kind}")(slot)
            tasks.append(task)
            requests.append(request)
        self.bound.insert_tasks(state=self.state, tasks=tasks, stream=self.bound.default_stream).wait()
        up.insert(self.theirs, requests, 4)

    def _enter(self, slot):
        if slot in self.held:  # the end of a request: hal's slot is released first
            self.state.release([slot])
        self.left.pop(slot, None)
        draw, self.count = self.draw, self.count + 1
        prompt = [draw.randrange(16) for _ in range(draw.randrange(1, 12))]
        output = [] if self.role == "decode" else [draw.randrange(16) for _ in range(draw.choice([0, 2]))]
        total = len(prompt) + len(output)
        start = draw.choice([0, draw.randrange(total)])
        end = draw.choice([total, draw.randrange(start + 1, total + 1)])
        words, stops = draw.choice([(), (3, 4)]), draw.choice([(), ((1, 2), (5,))])
        values = {"temperature": draw.choice([0.5, 1.5]), "top_p": draw.choice([0.25, 0.5]), "top_k": draw.randrange(9)}
        values |= {"min_p": draw.choice([0.0, 0.5]), "repetition_penalty": draw.choice([1.25, 2.0]), "seed": 7}
        values |= {"frequency_penalty": draw.choice([0.5, -0.5]), "presence_penalty": draw.choice([0.5, -0.5])}
        values |= {"min_tokens": draw.randrange(1, 4), "max_tokens": draw.randrange(5, 10)}
        eos, blocks = [2, draw.randrange(3, 9)], [draw.randrange(90) for _ in range(-(-total // 4) or 1)]
        name = f"r{self.count}"
        params = SamplingParams(**values, bad_words=words, stop_sequences=stops, eos_token_ids=tuple(eos))
        role = SplitRole.DECODE if self.role == "decode" else SplitRole.MIXED
        request = self.state.admit(Request(name, prompt, params, output, role))
        given = values | {"bad_words_token_ids": [*words], "stop_token_ids": [*map(list, stops)]}
        given["stop_seqs_len"] = [*map(len, stops)]
        entry = {"name": name, "request": request, "prompt": prompt, "output": output, "eos": eos, "blocks": blocks}
        if self.role == "decode":
            start, end, output = len(prompt), len(prompt) + 1, [30]
            task = Task(
                TaskKind.REMOTE_PREFILL, slot, request, start, blocks=blocks, first_token=30, drafts=(31,)
            )  # fmt: skip
            total, entry["output"] = end, output
        else:
            task = Task(TaskKind.PREFILL, slot, request, start, end - start, blocks)
        self.held[slot] = entry | {"next": end, "end": total, "values": given, "words": words, "stops": stops}
        return task, self._piece(slot, start, end)

    def _piece(self, slot, start, end):
        entry = self.held[slot]
        return up.Request(
            up.PREFILL, slot, entry["name"], prompt_token_ids=entry["prompt"], output_token_ids=entry["output"],
            prefill_start_index=start, prefill_end_index=end, block_tables=entry["blocks"],
            eos_token_ids=entry["eos"], draft_token_ids=[30, 31], values=entry["values"],
        )  # fmt: skip

    def _chunk(self, slot):
        """Between pieces a step runs: their kernel stops the slot, hal's books the tokens and runs on."""
        entry = self.held[slot]
        start = entry["next"]
        entry["next"] = end = self.draw.randrange(start + 1, entry["end"] + 1)
        for name, value in (("seq_lens_this_time_buffer", 0), ("seq_lens_decoder", 0), ("stop_flags", True)):
            self.theirs.share_inputs[name][slot] = value
        decoded = self.read("seq_lens_decoder")
        decoded[slot] = start
        self.write("seq_lens_decoder", decoded)
        task = Task(
            TaskKind.PREFILL_CHUNK, slot, entry["request"], start, end - start, first_block=len(entry["blocks"])
        )
        return task, self._piece(slot, start, end)

    def _blocks(self, slot):
        """Their table is replaced, hal's is appended to."""
        entry = self.held[slot]
        more, entry["blocks"] = [self.draw.randrange(90)], [*entry["blocks"]]
        task = Task(TaskKind.MORE_BLOCKS, slot, entry["request"], blocks=more, first_block=len(entry["blocks"]))
        entry["blocks"] += more
        return task, up.Request(up.DECODE, slot, entry["name"], block_tables=entry["blocks"])

    def _preempt(self, slot):
        return self._leave(slot, TaskKind.PREEMPTED, up.PREEMPTED)

    def _abort(self, slot):
        return self._leave(slot, TaskKind.ABORTED, up.ABORT)

    def _leave(self, slot, kind, their_kind):
        entry = self.left[slot] = self.held.pop(slot)
        self.gone.add(slot)
        return Task(kind, slot, entry["request"]), up.Request(their_kind, slot, entry["name"])

    def read(self, *names):
        """The fields as they are now; one alone if one is named."""
        memory = self.state.memory
        part = ByteRange(0, memory.nbytes)
        (copied := self.bound.copy_out(memory=memory, parts=[part], stream=self.bound.default_stream)).wait()
        found = {}
        for name in names:
            view = self.state.view(name)
            place = view.shape, view.dtype.storage, copied.data[0].data, view.offset, view.strides
            found[name] = np.ndarray(*place).copy()
        return found if len(names) > 1 else found[names[0]]

    def write(self, name, values):
        target = self.state.view(name)
        self.bound.async_set_value(target=target, value=values, stream=self.bound.default_stream).wait()

    def check(self):
        """Compare every slot that had a request; the differences are applied to FastDeploy's values."""
        ours = self.read(*SAME, *OTHERWISE)
        theirs = self.theirs.share_inputs
        for slot, entry in self.held.items():
            for name, tensor in SAME.items():
                assert ours[name][slot].reshape(-1)[0] == theirs[tensor][slot].reshape(-1)[0], name
            for name, value in self.otherwise(slot, entry, theirs).items():
                found = ours[name][slot].reshape(-1).tolist()
                assert found[: len(value)] == value, f"{name} is {found}, not {value}"
        for slot, entry in self.left.items():
            for name in ("stop_flags", "seq_lens_decoder", "seq_lens_encoder", "seq_lens_this_time"):
                assert ours[name][slot].reshape(-1)[0] == theirs[SAME[name]][slot].reshape(-1)[0], name
            assert ours["block_tables"][slot, : len(entry["blocks"])].tolist() == entry["blocks"], "block_tables"
            for name, value in EMPTY.items():
                assert ours[name][slot].reshape(-1)[0] == value, name

    def otherwise(self, slot, entry, theirs):
        """What hal's field has instead, by lines of the table."""
        known = entry["prompt"] + entry["output"]
        found = {
            "prompt_lens": [len(entry["prompt"])],  # resumed: the prompt alone
            "step_idx": [len(entry["output"])],  # resumed: always the tokens generated
            "token_ids": known + [-1] * (24 - len(known)),  # hal's row has the output too
            "eos_num": [2],  # end tokens: a list a slot
            "eos_token_ids": entry["eos"],
            "bad_words_num": [len(entry["words"])],  # empty: 0 in place of 1
            "bad_words": [*entry["words"], -1],
            "stop_seqs_num": [len(entry["stops"])],
            "stop_seqs_len": theirs["stop_seqs_len"][slot].tolist(),
            "block_tables": theirs["block_tables"][slot, : len(entry["blocks"])].tolist(),  # appended
        }
        if self.role == "decode":  # drafts of the decode role: column 0 is the first token
            first, draft = theirs["draft_tokens"][slot, :2].tolist()
            found |= {"next_tokens": [first], "draft_tokens": [draft, -1, -1], "draft_num": [1]}
        return found


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_drawn_sequences_differ_as_the_table_of_the_page_has_it(name):
    if name == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    draw = random.Random(29)
    with hal.open_device(name) as bound:
        for _ in range(share.of(SEQUENCES // 2)):
            both = Both(bound, draw)
            for _ in range(draw.randrange(1, 7)):
                both.act()
                both.check()
