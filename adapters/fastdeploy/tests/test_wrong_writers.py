"""Writers of an insertion that are wrong in one thing: the comparison with the reference finds each of them."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
from hal_core.memory.writes import Writes
from hal_fastdeploy import insertion

import hal

_spec = importlib.util.spec_from_file_location("test_insertion_shared", Path(__file__).with_name("test_insertion.py"))
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)
MOST = 60
"""Sequences until which a wrong writer must be found."""


def nothing(values):
    return None


def to_float(values):
    return values.astype(np.float64).astype(np.int64) if values.max() < 2**62 else values


def zero_for_one(values):
    return np.where(values == 1, 0, values)


WRONG = {
    # story: batch, tensor, call of Writes, what becomes of the values (None: the call is left out), method, role
    "a tail of tokens is left": ("target", "token_ids_all", "fill", nothing, "", "mixed"),
    "a block table grows and never shrinks": ("target", "block_tables", "fill", nothing, "", "mixed"),
    "blocks are not written": ("target", "block_tables", "ragged", nothing, "", "mixed"),
    "the piece is not fed": ("target", "input_ids", "ragged", nothing, "", "mixed"),
    "drafts of the decode role are lost": ("target", "draft_tokens", "ragged", nothing, "naive", "decode"),
    "the decode role feeds one token too many": (
        "target",
        "seq_lens_this_time_buffer",
        "rows",
        lambda v: v + 1,
        "",
        "decode",
    ),
    "the decode role prefills": ("target", "seq_lens_encoder", "rows", lambda v: v + 1, "", "decode"),
    "the cached prefix is prefilled again": ("target", "seq_lens_decoder", "rows", np.zeros_like, "", "mixed"),
    "a length is not of all tokens": ("target", "prompt_lens", "rows", lambda v: v - 1, "", "mixed"),
    "a chunk counts generated tokens": ("target", "step_idx", "rows", lambda v: v + (v == 0), "", "mixed"),
    "a stopped slot stays stopped": ("target", "stop_flags", "fill", nothing, "", "mixed"),
    "a blocked slot stays blocked": ("target", "is_block_step", "fill", nothing, "", "mixed"),
    "a blocked slot's length stays": ("target", "step_seq_lens_decoder", "fill", nothing, "", "mixed"),
    "seeds are rounded": ("target", "infer_seed", "rows", to_float, "", "mixed"),
    "no bad words have the length 0": ("target", "bad_tokens_len", "rows", zero_for_one, "", "mixed"),
    "bad words of before stay": ("target", "bad_tokens", "fill", nothing, "", "mixed"),
    "stop sequences of before stay": ("target", "stop_seqs_len", "rows", nothing, "", "mixed"),
    "tokens of stop sequences are lost": ("target", "stop_seqs", "set", nothing, "", "mixed"),
    "end tokens are the first request's": ("target", "eos_token_id", "set", nothing, "", "mixed"),
    "the encoder's blocks are not counted": ("target", "encoder_block_lens", "rows", nothing, "", "mixed"),
    "the first token of an XPU's prompt is kept": ("target", "first_token_ids", "rows", np.zeros_like, "", "mixed"),
    "an XPU's length of before is kept": ("target", "ori_seq_lens_encoder", "rows", nothing, "", "mixed"),
    "an XPU's lengths are the target's buffer": ("target", "seq_lens_this_time", "rows", nothing, "", "mixed"),
    "a thinking limit stays": ("target", "max_think_lens", "rows", nothing, "", "mixed"),
    "a limit of the reply stays": ("target", "max_reply_lens", "rows", nothing, "", "mixed"),
    "a request that does not think does": ("target", "enable_thinking", "rows", np.ones_like, "", "mixed"),
    "the end of thinking stays": ("target", "limit_think_status", "rows", nothing, "", "mixed"),
    "an XPU's history stays": ("target", "pre_ids", "fill", nothing, "", "mixed"),
    "the proposer is not fed": ("proposer", "input_ids", "ragged", nothing, "mtp", "mixed"),
    "the proposer's mask is kept": ("proposer", "mask_rollback", "fill", nothing, "mtp", "decode"),
    "the proposer's drop flag is kept": ("proposer", "batch_drop", "fill", nothing, "mtp", "mixed"),
    "the proposer's table is not replaced": ("proposer", "block_tables", "fill", nothing, "mtp", "mixed"),
}


@pytest.mark.parametrize("story", WRONG)
def test_a_wrong_writer_is_found(story, monkeypatch):
    batch, name, call, change, method, role = WRONG[story]

    def compared():
        draw = random.Random(story)
        for _ in range(MOST):
            pair = shared.Pair(device, method, role, cached=8, kind="xpu" if name in shared.up.XPU_ALONE else "gpu")
            views = (pair.insertion.target if batch == "target" else pair.insertion.proposer).found
            monkeypatch.setattr(insertion, "Writes", lambda view=views[name].view: Wrong(view, call, change))
            names = {}
            for _ in range(4):
                pair.insert([shared.drawn(draw, draw.randrange(4), role, names) for _ in range(3)])
                pair.check()

    with hal.open_device("cpu") as device, pytest.raises(AssertionError, match=name):
        compared()


class Wrong(Writes):
    """Writes of which one call to one tensor goes wrong. Part of a tensor counts as the tensor."""

    def __init__(self, view, call, change):
        super().__init__()
        true = getattr(super(), call)

        def wrong(target, *given, **more):
            if target.memory is not view.memory:
                return true(target, *given, **more)
            values = change(np.array(given[1])) if call == "rows" else change(None)
            return None if values is None else true(target, given[0], values.astype(target.dtype.storage))

        setattr(self, call, wrong)
