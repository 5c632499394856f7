"""The slot table: every field that plain and speculative decoding keep for a slot, declared once.

A slot holds one running request. Each field is one contiguous ``[slots, width]`` array. The order of the table is the
order of storage, chosen so that the fields of each group are adjacent: a broadcast is one collective over a slice, an
output copy one device-to-host copy, and neither packs data.

The names follow FastDeploy's ``share_inputs`` where it has the field (``seq_lens_encoder``, ``accept_num``, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from ..errors import InvalidValue
from ..memory.dtypes import DType, dtype_of
from .sampling_params import PARAMS, Param

Source = Literal["extra"] | Callable[[Any], object] | None
"""Source of a declared field's value: ``Request.extra``, a function of the request, or only the step."""


class SplitRole(IntEnum):
    """The worker's part of a prefill/decode split for a request."""

    MIXED = 0
    PREFILL = 1
    DECODE = 2


class FinishReason(IntEnum):
    """Why a request ends with this row; ``NONE`` while it does not."""

    NONE = 0
    STOP = 1  #: an end-of-sequence token or a stop sequence
    LENGTH = 2
    ABORT = 3
    ERROR = 4


HEADER = "header"
"""Name prefix of the 64-byte header that begins each broadcast slice (G14)."""
HEADER_BYTES = 64

GROUPS = ("broadcast", "broadcast_speculative", "output", "output_topk", "step_input")


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The sizes of one slot state; all counts.

    - ``num_slots``: how many requests can be in the state at once.
    - ``max_model_len``: most tokens, prompt and generated, that one request may have.
    - ``block_size``: tokens in one block of the paged KV cache.
    - ``max_draft_tokens``: most draft tokens a step may verify; 0 means plain decoding.
    - ``max_logprobs``: most alternatives whose log-probabilities a step can report, besides the sampled token's.
    - ``max_eos``, ``max_stop_sequences``, ``max_stop_length``, ``max_bad_words``: bounds of a request's lists; a bad
      word is one token here.
    - ``vocab_size``: token ids are from 0 to this number less one; 0: unknown, any id of at least 0 is valid.
    """

    num_slots: int
    max_model_len: int
    block_size: int = 16
    max_draft_tokens: int = 0
    max_logprobs: int = 20
    max_eos: int = 8
    max_stop_sequences: int = 8
    max_stop_length: int = 16
    max_bad_words: int = 64
    vocab_size: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            least = 0 if name in ("max_draft_tokens", "max_logprobs", "vocab_size") else 1
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise InvalidValue(  # lengths and slots are int32 in the state and in plans
                    f"{name} = {value!r}", cure=f"give a whole number from {least} to 2**31 - 1", argument="sizes"
                )

    @property
    def max_blocks(self) -> int:
        """Blocks that the longest request needs."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_accept(self) -> int:
        """Most tokens one step can give a request: every draft and the one after them."""
        return self.max_draft_tokens + 1

    @property
    def token_limit(self) -> int:
        """Token ids are below this number, and at least 0."""
        return self.vocab_size or 1 << 63

    def width(self, name: str | int) -> int:
        """Return the number of elements per slot of a field whose width is ``name``."""
        if isinstance(name, int):
            return name
        widths = {
            "1": 1,
            "max_model_len": self.max_model_len,
            "max_blocks": self.max_blocks,
            "max_accept": self.max_accept,
            "draft": max(1, self.max_draft_tokens),
            "topk": self.max_accept * (self.max_logprobs + 1),
            "max_eos": self.max_eos,
            "stop_sequences": self.max_stop_sequences,
            "stop_tokens": self.max_stop_sequences * self.max_stop_length,
            "bad_words": self.max_bad_words,
        }
        return widths[name]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: ``width`` names an entry of :meth:`StateConfig.width`; ``reset`` is the stored value of an empty slot.

    ``record`` fields are part of a request's packed record, made at admission. The others are rows that a plan writes
    up to the request's own length and resets up to the length written before (G11), or are written only by the step, or
    by insertion and clean-up (``CLEANUP_FIELDS``).
    ``param`` names the sampling parameter that admission copies into a record field, if any. ``source`` and ``kept``
    belong to declared fields (:class:`hal_core.slots.declared.StateField`). ``about``: what the value means.
    """

    name: str
    dtype: DType
    width: str | int
    reset: int | float | bool
    groups: frozenset[str]
    record: bool
    param: str = ""
    source: Source = None
    kept: bool = False
    about: str = ""


def _field(
    name: str,
    dtype: str,
    width: str = "1",
    reset: float = 0,
    groups: str = "",
    record: bool = True,
    param: str = "",
    about: str = "",
) -> Field:
    chosen = frozenset(groups.split())
    unknown = chosen - set(GROUPS)
    if unknown:
        raise InvalidValue(f"field {name} names unknown groups {sorted(unknown)}", argument="groups")
    return Field(name, dtype_of(dtype), width, reset, chosen, record, param, about=about)


def _parameter(row: Param) -> Field:
    """Return the field of a sampling parameter; an empty slot generates no token. The seed is mixed with the request's
    name, so admission gives it."""
    name = {"min_tokens": "min_dec_len", "max_tokens": "max_dec_len"}.get(row.name, row.name)
    param = "" if row.name == "seed" else row.name
    return _field(name, row.dtype, "1", 0 if row.name == "max_tokens" else row.off, _STEP, param=param, about=row.help)


_TOPK = "output_topk"
_OUT = "output_topk output step_input"
_STEP = "step_input"

STATE_TABLE: tuple[Field, ...] = (
    # [max_accept, max_logprobs + 1] a slot.
    _field(
        "topk_token_ids",
        "int64",
        "topk",
        -1,
        _TOPK,
        record=False,
        about="token ids of the alternatives of each token, the sampled one first; -1: unused",
    ),
    _field(
        "topk_logprobs",
        "float32",
        "topk",
        0.0,
        _TOPK,
        record=False,
        about="their log-probabilities, natural logarithms of the raw logits",
    ),
    _field(
        "topk_ranks",
        "int32",
        "max_accept",
        0,
        _TOPK,
        record=False,
        about="place of each sampled token among all tokens, from 1; 0: no token",
    ),
    # Fields that ranks must share after plain decoding: one token a slot. A state with drafts runs plain steps too, so
    # its slice has this field as well: one slice for both kinds of step.
    _field(
        "sampled_token_ids",
        "int64",
        "1",
        -1,
        f"{_OUT} broadcast broadcast_speculative",
        about="the token of a plain step; -1: none",
    ),
    # Further fields that ranks must share after speculative decoding.
    _field(
        "accept_tokens",
        "int64",
        "max_accept",
        -1,
        f"{_OUT} broadcast_speculative",
        about="with drafts: the tokens of the step, drafts that hold and the one after them; -1: unused",
    ),
    _field(
        "accept_num",
        "int32",
        "1",
        0,
        f"{_OUT} broadcast_speculative",
        about="tokens that the step gave; 0: the slot did not run, or fed a piece of its prompt",
    ),
    _field("step_idx", "int64", "1", 0, f"{_OUT} broadcast_speculative", about="tokens generated so far"),
    _field("stop_flags", "bool", "1", True, f"{_OUT} broadcast_speculative", about="true: the slot does not run"),
    # The other fields that a step reports.
    _field("stop_reason", "int32", "1", 0, _OUT, about="why the request has ended, a FinishReason; 0: it has not"),
    _field("request_serial", "int64", "1", 0, _OUT, about="which request the slot holds; 0: none"),
    _field(
        "last_preempted",
        "int64",
        "1",
        0,
        _OUT,
        record=False,
        about="admission id of the request preempted since the last output, or 0",
    ),
    _field(
        "last_aborted",
        "int64",
        "1",
        0,
        _OUT,
        record=False,
        about="admission id of the request aborted since the last output, or 0",
    ),
    _field("seq_lens_decoder", "int32", "1", 0, _OUT, about="tokens whose keys and values are in the cache"),
    _field("draft_num", "int32", "1", 0, _OUT, about="drafts that the next step verifies"),
    _field("draft_tokens", "int64", "draft", -1, _OUT, about="these drafts, in order; -1: unused"),
    # Further inputs of the next step.
    _field("next_tokens", "int64", "1", -1, _STEP, about="the token that decoding feeds next; -1: none yet"),
    _field("prompt_lens", "int64", "1", 0, _STEP, about="tokens of the prompt"),
    _field(
        "seq_lens_this_time",
        "int32",
        "1",
        0,
        _STEP,
        about="tokens that the next step feeds, drafts included; 0: the slot is idle",
    ),
    _field("seq_lens_encoder", "int32", "1", 0, _STEP, about="of these, tokens of the prompt; 0: the slot decodes"),
    _field("split_role", "int32", "1", 0, _STEP, about="the worker's part in a prefill/decode split, a SplitRole"),
    *map(_parameter, PARAMS),
    _field("logprobs_num", "int32", "1", -1, _STEP, about="alternatives to report; -1: no log-probabilities"),
    _field("eos_num", "int32", "1", 0, _STEP, about="end tokens in `eos_token_ids`"),
    _field("eos_token_ids", "int64", "max_eos", -1, _STEP, about="tokens that end the answer"),
    _field("stop_seqs_num", "int32", "1", 0, _STEP, about="sequences in `stop_seqs`"),
    _field("bad_words_num", "int32", "1", 0, _STEP, about="tokens in `bad_words`"),
    _field("blocks_num", "int32", "1", 0, _STEP, about="blocks in `block_tables`"),
    _field("bad_words", "int64", "bad_words", -1, _STEP, record=False, about="tokens that are never sampled"),
    _field("stop_seqs_len", "int32", "stop_sequences", 0, _STEP, record=False, about="tokens of each stop sequence"),
    _field(
        "stop_seqs",
        "int64",
        "stop_tokens",
        -1,
        _STEP,
        record=False,
        about="stop sequences, each in a row of `max_stop_length` tokens",
    ),
    _field(
        "block_tables",
        "int32",
        "max_blocks",
        -1,
        _STEP,
        record=False,
        about="KV blocks of the request, by the order of its tokens; -1: unused",
    ),
    _field("token_ids", "int64", "max_model_len", -1, record=False, about="prompt and generated tokens, in order"),
)

ROW_FIELDS = ("bad_words", "stop_seqs_len", "stop_seqs", "block_tables", "token_ids")
"""Rows that ``insert_tasks`` writes to a request's own length and resets to the longest length since (G11)."""

CLEANUP_FIELDS = ("last_preempted", "last_aborted")
"""Fields that ``save_output`` cleans up after each step, on every rank (G18)."""
