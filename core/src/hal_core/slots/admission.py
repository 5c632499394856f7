"""Requests and their admission, which checks a request once and packs what its slot will need."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ..errors import InvalidValue
from .fields import SplitRole
from .layout import REQUEST_ROW, StateLayout
from .request_ids import check_request_id
from .sampling_params import SamplingParams as SamplingParams
from .sampling_params import check_number

Int64s = np.ndarray[Any, np.dtype[np.int64]]
_admission_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for: token ids of the prompt and how to go on.

    ``output`` holds tokens generated before, when a preempted request is resumed.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    output: Sequence[int] = ()
    role: SplitRole = SplitRole.MIXED

    def __post_init__(self) -> None:
        check_request_id(self.request_id)
        if not isinstance(self.params, SamplingParams):
            raise InvalidValue(
                f"params = {self.params!r}", cure="give SamplingParams(…), or leave it out", argument="params"
            )
        if not isinstance(self.role, SplitRole):
            raise InvalidValue(f"role = {self.role!r}", cure="give a SplitRole, or leave it out", argument="role")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdmittedRequest:
    """A request that fits a state's sizes, packed for its slot. Made by :func:`admit`; nothing changes it.

    - ``admission_id``: the number that names this stay of the request in a slot; a resumed request has a new one.
    - ``tokens``: int64 ``[prompt + output]``, read-only; ``prompt_len`` and ``generated`` are its two parts.
    - ``total``: tokens known so far, prompt and generated.
    - ``config_key``: which sizes it was checked against (``StateLayout.config_key``).
    - ``packed``: row lengths, admission id, config key and record (``StateLayout.admission_dtype``), as bytes; what
      depends on the moment of insertion (lengths, blocks, drafts) is set then. ``request_row`` comes before the record.
    - ``row_lengths``: the lengths of its rows, in the order of ``ROW_FIELDS``, the block table's 0.
    - ``rows``: the bytes of each of ``ROW_FIELDS``, of the tokens those of ``tokens`` themselves; the block table is
      empty, its blocks come with the task.
    """

    request_id: str
    admission_id: int
    tokens: Int64s
    prompt_len: int
    generated: int
    params: SamplingParams
    role: SplitRole
    total: int
    config_key: int
    packed: bytes
    request_row: bytes
    row_lengths: tuple[int, int, int, int, int]
    rows: tuple[bytes | memoryview, ...]

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: the admission id, and what devices know by it, are of this process alone."""
        raise InvalidValue(
            f"the admitted request {self.request_id!r} belongs to the process that admitted it",
            cure="send the Request, and admit it where it is inserted",
            argument="request",
        )


def admit(request: Request, layout: StateLayout, *, vocab_size: int | None = None) -> AdmittedRequest:
    """Check ``request`` against the sizes of a state, and pack it.

    Raises :class:`InvalidValue`, naming the request and the cure, for an empty or too long prompt, tokens that
    are no whole numbers of at least 0 (below the state's ``vocab_size``, or a lower one that is given), and lists
    longer than the state's bounds. One bad request never takes others along: nothing is shared.
    """
    _check_admission(request, layout, vocab_size)
    sizes, params = layout.sizes, request.params
    prompt, output = _tokens(request, request.prompt, "prompt"), _tokens(request, request.output, "output")
    tokens = np.concatenate([prompt, output]) if len(output) else prompt
    _check_lengths(request, len(prompt), len(output), layout)
    limit = min(sizes.token_limit, vocab_size or sizes.token_limit)
    if len(tokens) and int(tokens.max()) >= limit:
        raise InvalidValue(
            f"token {int(tokens.max())} is outside the vocabulary of {limit}",
            cure="tokenize with the model's own tokenizer",
            argument=f"request {request.request_id!r}",
        )
    tokens.flags.writeable = False
    admission_id, total, stops = next(_admission_ids), len(tokens), len(params.stop_sequences)
    # Filled in place, from bytes: NumPy copies structured values field by field.
    head = np.frombuffer(bytearray(_template(layout)), layout.admission_dtype)
    _fill(head["record"], request, layout, admission_id, len(prompt), len(output))
    row_lengths = (len(params.bad_words), stops, stops * sizes.max_stop_length, 0, total)
    head["row_lengths"], head["admission_id"] = row_lengths, admission_id
    bad = stop_lengths = stop = b""
    if params.bad_words:
        bad = np.array(params.bad_words, np.int64).tobytes()
    if stops:
        stop_lengths = np.array([len(s) for s in params.stop_sequences], np.int32).tobytes()
        padded = np.full((stops, sizes.max_stop_length), -1, np.int64)
        for at, sequence in enumerate(params.stop_sequences):
            padded[at, : len(sequence)] = sequence
        stop = padded.tobytes()
    rows, packed = (bad, stop_lengths, stop, b"", tokens.data.cast("B")), head.tobytes()
    return AdmittedRequest(
        request_id=request.request_id,
        admission_id=admission_id,
        tokens=tokens,
        prompt_len=len(prompt),
        generated=len(output),
        params=params,
        role=request.role,
        total=total,
        config_key=layout.config_key,
        packed=packed,
        request_row=packed[: REQUEST_ROW.itemsize],
        row_lengths=row_lengths,
        rows=rows,
    )


def _check_admission(request: Request, layout: StateLayout, vocab_size: int | None) -> None:
    """Refuse arguments of another kind."""
    if not isinstance(request, Request):
        raise InvalidValue(f"{type(request).__name__} is no Request", cure="make a Request", argument="request")
    if not isinstance(layout, StateLayout):
        raise InvalidValue(f"{type(layout).__name__} is no layout", cure="give state.layout", argument="layout")
    if vocab_size is not None:
        check_number("vocab_size", vocab_size, 1, whole=True)


def _tokens(request: Request, values: Sequence[int], name: str) -> Int64s:
    """The token ids as a new int64 array; floats, bools and negative numbers are refused by value."""
    try:
        array = np.array(values)  # the caller's own may change while it is checked
    except (TypeError, ValueError):  # a ragged list, or something that cannot be an array
        array = np.array(None)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise InvalidValue(
            f"{name} must be one list of token ids, whole numbers from 0 to 2**31 - 1",
            cure="give the ids that the model's own tokenizer makes, one flat list a request",
            argument=f"request {request.request_id!r}",
        )
    tokens: Int64s = array.astype(np.int64, copy=False)
    return tokens


def _check_lengths(request: Request, prompt_len: int, generated: int, layout: StateLayout) -> None:
    sizes, params, who = layout.sizes, request.params, f"request {request.request_id!r}"
    if prompt_len == 0:
        raise InvalidValue("the prompt has no tokens", cure="give at least one token", argument=who)
    if prompt_len + generated >= sizes.max_model_len:
        raise InvalidValue(
            f"{prompt_len + generated} tokens leave no room to generate in {sizes.max_model_len}",
            cure=f"shorten the prompt to at most {sizes.max_model_len - 1} tokens",
            argument=who,
        )
    if generated >= params.max_tokens:
        raise InvalidValue(f"{generated} tokens are generated already", cure="raise max_tokens", argument=who)
    longest = max(map(len, params.stop_sequences), default=0)
    for name, count, bound in (
        ("stop_sequences", len(params.stop_sequences), sizes.max_stop_sequences),
        ("the longest stop sequence", longest, sizes.max_stop_length),
        ("bad_words", len(params.bad_words), sizes.max_bad_words),
        ("eos_token_ids", len(params.eos_token_ids), sizes.max_eos),
        ("logprobs", params.logprobs or 0, sizes.max_logprobs),
    ):
        if count > bound:
            raise InvalidValue(
                f"{name}: {count} is over the state's bound of {bound}", cure="ask for less", argument=who
            )


_templates: dict[bytes, bytes] = {}


def _template(layout: StateLayout) -> bytes:
    """What admission packs (``layout.admission_dtype``) with an empty slot's record, as bytes."""
    template = _templates.get(layout.digest)
    if template is None:
        head = np.zeros(1, layout.admission_dtype)
        head["config_key"] = layout.config_key
        record = head["record"]
        for name in layout.record_dtype.names or ():
            record[name] = layout.fields[name].field.reset
        template = _templates[layout.digest] = head.tobytes()
    return template


def empty_record(layout: StateLayout) -> np.ndarray[Any, np.dtype[np.void]]:
    """A record of an empty slot, shape ``[1]``: every field at its reset value."""
    return np.frombuffer(_template(layout), layout.admission_dtype)["record"].copy()


def draw_seed(seed: int, request_id: str) -> int:
    """The number that a request's draws depend on besides their position: its seed and its name, mixed.

    The multiplier is the 64-bit golden ratio of Knuth's multiplicative hashing; the result is 0 to 2**63 - 1.
    """
    return (seed ^ (zlib.crc32(request_id.encode()) * 0x9E37_79B9_7F4A_7C15)) & (2**63 - 1)


def _fill(
    rec: np.ndarray[Any, np.dtype[np.void]],
    request: Request,
    layout: StateLayout,
    admission_id: int,
    prompt_len: int,
    generated: int,
) -> None:
    """Put the request into a packed record, shape ``[1]``: the parameters by the slot table, the rest by name."""
    params, row = request.params, rec[0]
    for name, param in layout.param_fields:
        row[name] = getattr(params, param)
    row["request_serial"], row["prompt_lens"], row["step_idx"] = admission_id, prompt_len, generated
    row["stop_flags"], row["split_role"] = False, request.role
    row["seed"] = draw_seed(params.seed, request.request_id)
    row["logprobs_num"] = -1 if params.logprobs is None else params.logprobs
    if params.eos_token_ids:
        row["eos_num"] = len(params.eos_token_ids)
        rec["eos_token_ids"].reshape(1, -1)[0, : len(params.eos_token_ids)] = params.eos_token_ids  # width 1: no axis
    row["stop_seqs_num"], row["bad_words_num"] = len(params.stop_sequences), len(params.bad_words)
