"""Admission of several requests by one call.

What depends on their parameters alone is packed once for all that share them, and the rest is a few columns: NumPy and
the loop below take a quarter of the time of as many calls of :func:`hal_core.admit`. A request that is not plain
(declared fields, tokens of an earlier stay, a role), or that is refused, is admitted alone, so that its error is its
own.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, attrgetter
from struct import Struct, error, iter_unpack
from typing import Any
from zlib import crc32

import numpy as np

from ..errors import InvalidValue
from . import admission
from .admission import AT_ONCE, GOLDEN, ROW_NUMBERS, AdmittedRequest, Request, lists_of, packed
from .fields import SplitRole
from .layout import ADMISSION_ID, CONFIG_KEY, REQUEST_ROW, TOKENS_LEFT, StateLayout
from .native_columns import NativeColumns
from .sampling_params import SamplingParams, check_number

FEW = 6
"""Up to so many requests are admitted one by one, which is quicker."""
MOST_IDS = 131072
"""Most token ids of a part: joining a megabyte gives up the interpreter's lock, and a busy thread then keeps it."""
TOKENS = ADMISSION_ID - 1
"""Column of a request's row (:data:`REQUEST_ROW`) with the number of its tokens, after those of its lists."""
Ids = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedColumns:
    """Requests that were packed together, as buffers that a device may read until ``on_admit_all`` returns.

    - ``requests``: as admitted, in order.
    - ``rows``: int64 ``[n, 8]``, their :data:`REQUEST_ROW`; ``records``: their records, one after the other.
    - ``lists``: of bad words, lengths of stop sequences and stop sequences, all requests' bytes, one after the other.
    - ``ids``: all token ids, ``width`` bytes each: int32 or int64.
    """

    requests: list[AdmittedRequest]
    rows: bytes
    records: bytes
    lists: tuple[bytes, bytes, bytes]
    ids: bytes
    width: int


Admitted = AdmittedRequest | InvalidValue
Alone = Callable[[Request], AdmittedRequest]


def admit_all(
    requests: Sequence[Request],
    layout: StateLayout,
    alone: Alone,
    taken: Callable[[AdmittedColumns], object],
    *,
    vocab_size: int | None = None,
    together: bool = True,
    native: NativeColumns | None = None,
) -> list[Admitted]:
    """Admit requests; return each as admitted, or the error that refuses it.

    :param alone: admits a request that is not plain, or raises its :class:`InvalidValue`.
    :param taken: called with the columns of those that were packed together, once for some hundred requests.
    :param together: False admits each alone.
    :param native: a device's functions for it, if any.
    """
    if vocab_size is not None:
        check_number("vocab_size", vocab_size, 1, integer=True)
    found: list[Admitted | None] = [None] * len(requests)
    plain = _plain(requests, layout) if together and not layout.declared else []
    for part in _parts(requests, plain) if len(plain) > FEW else ():
        columns = _packed([requests[at] for at in part], layout, vocab_size, native)
        if columns is not None:
            taken(columns)
            for at, one in zip(part, columns.requests, strict=True):
                found[at] = one
    return [_alone(requests[at], alone) if one is None else one for at, one in enumerate(found)]


def _alone(request: Request, admit: Alone) -> Admitted:
    try:
        return admit(request)
    except InvalidValue as refused:
        return refused


def _plain(requests: Sequence[Request], layout: StateLayout) -> Sequence[int]:
    """Return which requests can be packed together: new ones whose parameters and lengths fit."""
    known = [at for at, one in enumerate(requests) if type(one) is Request]
    columns = [*map(_plainness, map(requests.__getitem__, known))]
    if not columns or _are_plain(layout, *zip(*columns, strict=True)):
        return known
    return [at for at, one in zip(known, columns, strict=True) if _are_plain(layout, *[(value,) for value in one])]


_plainness = attrgetter("params", "output", "extra", "role", "prompt")
_LISTS = {list, tuple, np.ndarray}


def _are_plain(
    layout: StateLayout,
    params: Sequence[SamplingParams],
    outputs: Sequence[Any],
    extras: Sequence[Any],
    roles: Sequence[Any],
    prompts: Sequence[Any],
) -> bool:
    return (
        not any(map(len, outputs))
        and not any(extras)
        and {*roles} == {SplitRole.MIXED}
        and {*map(type, prompts)} <= _LISTS
        and 0 < min(map(len, prompts)) <= max(map(len, prompts)) < layout.sizes.max_model_len
        and all(_fit(layout, one) for one in {id(one): one for one in params}.values())
    )


def _fit(layout: StateLayout, params: SamplingParams) -> bool:
    """Return whether parameters fit a state's bounds."""
    try:
        admission.check_lists(Request("r", (0,), params), layout)
    except InvalidValue:
        return False
    return True


def _parts(requests: Sequence[Request], chosen: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide requests so that the ids and the columns of a part are short enough to keep the interpreter's lock."""
    for first in range(0, len(chosen), AT_ONCE):
        part = chosen[first : first + AT_ONCE]
        ends = [*itertools.accumulate([len(requests[at].prompt) for at in part])]
        begin = 0
        while begin < len(part):
            end = max(begin + 1, bisect(ends, (ends[begin - 1] if begin else 0) + MOST_IDS))
            yield part[begin:end]
            begin = end


def _packed(
    requests: list[Request], layout: StateLayout, vocab_size: int | None, native: NativeColumns | None
) -> AdmittedColumns | None:
    """Return the requests packed; None if one of them is to be refused for its ids."""
    names, prompts, params = zip(*map(_name_prompt_params, requests), strict=True)
    limit = min(layout.sizes.token_limit, vocab_size or layout.sizes.token_limit, 2**31)
    ids, width = _joined(prompts)
    fits = within if native is None else native.within
    if not ids or not fits(np.frombuffer(ids, f"i{width}"), limit):
        return None
    made = {key: _template_of(layout, one) for key, one in {id(one): one for one in params}.items()}
    templates = [made[id(one)] for one in params]
    n, totals = len(requests), [*map(len, prompts)]
    serials = [*itertools.islice(admission.admission_ids, n)]
    records = np.frombuffer(bytearray(b"".join([one.record for one in templates])), layout.record_dtype)
    records["request_serial"], records["prompt_lens"] = serials, totals
    codes = np.array([crc32(name.encode()) for name in names], np.uint64)
    seeds = np.array([one.seed for one in params], np.uint64)
    records["seed"] = ((seeds ^ codes * np.uint64(GOLDEN)) & np.uint64(2**63 - 1)).view(np.int64)  # as draw_seed
    rows = np.frombuffer(bytearray(b"".join([one.row for one in templates])), np.int64).reshape(n, -1)
    rows[:, TOKENS], rows[:, ADMISSION_ID], rows[:, CONFIG_KEY] = totals, serials, layout.config_key
    rows[:, TOKENS_LEFT] = [one.max_tokens for one in params]
    lists = [b"".join([one.lists[which] for one in templates]) for which in range(3)]
    columns = AdmittedColumns([], rows.tobytes(), records.tobytes(), (lists[0], lists[1], lists[2]), ids, width)
    known = names, params, templates, serials, totals
    columns.requests.extend(_requests(columns, layout.config_key, *known))
    return columns


_name_prompt_params = attrgetter("request_id", "prompt", "params")


def _requests(
    columns: AdmittedColumns,
    config_key: int,
    names: Sequence[str],
    params: Sequence[SamplingParams],
    templates: Sequence[_ParamsTemplate],
    serials: Sequence[int],
    totals: Sequence[int],
) -> Iterator[AdmittedRequest]:
    """Return each request with bytes of its own: one that lives long keeps no bytes of another."""
    ids, width, same = columns.ids, columns.width, itertools.repeat
    ends = [*itertools.accumulate([width * total for total in totals], initial=0)]
    own = [ids[begin:end] for begin, end in itertools.pairwise(ends)]
    rows = [row for (row,) in iter_unpack(f"{REQUEST_ROW.itemsize}s", columns.rows)]
    wholes = map(add, rows, [one for (one,) in iter_unpack(f"{len(templates[0].record)}s", columns.records)])
    lengths = [(*one.lengths, 0, total) for one, total in zip(templates, totals, strict=True)]
    lists = [one.lists for one in templates]
    head, tail = (names, serials, own, totals, same(0), params, same(SplitRole.MIXED)), (wholes, rows, lengths, lists)
    return map(AdmittedRequest, *head, totals, same(config_key), *tail)


@dataclass(frozen=True, slots=True)
class _ParamsTemplate:
    """What admission packs of sampling parameters alone: a request's record, its row and its lists."""

    record: bytes
    row: bytes
    lengths: tuple[int, int, int]
    lists: tuple[bytes, bytes, bytes]


_values = attrgetter(*(name for name in SamplingParams.__slots__ if name != "seed"))
"""All parameters but the seed, which is mixed with each request's name."""
_known: dict[tuple[int, Any], _ParamsTemplate] = {}
MOST_KNOWN = 4096
"""Most parameters whose packed parts are kept; then all are dropped."""


def _template_of(layout: StateLayout, params: SamplingParams) -> _ParamsTemplate:
    key = layout.config_key, _values(params)
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        stops, longest = len(params.stop_sequences), layout.sizes.max_stop_length
        lengths = len(params.bad_words), stops, stops * longest
        row = array("q", [*lengths, *[0] * (ROW_NUMBERS - 3)]).tobytes()
        record = packed(Request("r", (0,), params), layout, (0,) * ADMISSION_ID, 0, 0, 0)[REQUEST_ROW.itemsize :]
        lists = lists_of(params.bad_words, params.stop_sequences, longest)
        found = _known[key] = _ParamsTemplate(record, row, lengths, lists)
    return found


def _joined(prompts: Sequence[Any]) -> tuple[bytes, int]:
    """Return all ids as bytes, and the bytes of one: int32 or int64; no bytes for what is no list of ids."""
    kinds = {(one.dtype, one.ndim, one.flags.c_contiguous) if type(one) is np.ndarray else None for one in prompts}
    if None in kinds:
        try:
            pieces = [_as_int32(one) for one in prompts]
        except (error, ValueError, TypeError):
            return b"", 4
        return b"".join(pieces), 4
    if len(kinds) > 1 or next(iter(kinds)) not in ((np.dtype(np.int32), 1, True), (np.dtype(np.int64), 1, True)):
        return b"", 4
    return b"".join(prompts), prompts[0].itemsize


@lru_cache(maxsize=4096)
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"={count}i").pack


def _as_int32(ids: Sequence[int] | Ids) -> bytes:
    """Return ids as int32 bytes; of a list in a third of NumPy's time. Raises for what does not fit or is no number."""
    if isinstance(ids, np.ndarray):
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise ValueError(ids.dtype)
        return ids.tobytes()
    return _packer(len(ids))(*ids)


def within(ids: Ids, limit: int) -> bool:
    """Return whether all ids are at least 0 and below ``limit``. In pieces that keep the interpreter's lock."""
    unsigned = ids.view(np.uint32 if ids.itemsize == 4 else np.uint64)  # a negative one is too large
    complete = len(unsigned) // AT_ONCE * AT_ONCE
    most, higher = np.zeros(AT_ONCE, unsigned.dtype), np.maximum
    for piece in unsigned[:complete].reshape(-1, AT_ONCE):
        higher(most, piece, out=most)
    return max(int(higher.reduce(most)), int(higher.reduce(unsigned[complete:], initial=0))) < limit
