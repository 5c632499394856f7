"""Admission of several requests by one call.

What depends on their parameters alone is packed once for all that share them, and the rest is a few columns: NumPy and
the loop below take a quarter of the time of as many calls of :func:`hal_core.admit`. A request that is not plain
(declared fields, tokens of an earlier stay, a role), or that is refused, is admitted alone, so that its error is its
own.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from struct import Struct, error, iter_unpack
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidValue
from . import admission
from .admission import AT_ONCE, AdmittedRequest, Request, lists_of
from .fields import SplitRole
from .host_table import TOKENS
from .layout import StateLayout
from .native_columns import NativeColumns
from .sampling_params import SamplingParams, check_number

FEW = 6
"""Up to so many requests are admitted one by one, which is quicker."""
MOST_IDS = 131072
"""Token ids of a part: it ends at the request with which it would have more, unless that is its first. Joining a
megabyte gives up the interpreter's lock, and a busy thread then keeps it; native code keeps it."""
Ids = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedColumns:
    """Requests that were packed together, as buffers that a device may read until ``on_admit_all`` returns.

    - ``requests``: as admitted, in order.
    - ``packed``: of each its ``REQUEST_ROW`` and its record (``StateLayout.admission_dtype``), one after the other.
    - ``lists``: of bad words, lengths of stop sequences and stop sequences, all requests' bytes, one after the other.
    - ``ids``: each request's token ids, ``width`` bytes each: int32 or int64.
    """

    requests: list[AdmittedRequest]
    packed: bytes
    lists: tuple[bytes, bytes, bytes]
    ids: list[bytes]
    width: int


Admitted = AdmittedRequest | InvalidValue
Alone = Callable[[Request], AdmittedRequest]


class _Columns(NamedTuple):
    """Plain requests: names, parameters and what is packed of them, each request's ids, and the bytes of an id."""

    names: Sequence[str]
    params: Sequence[SamplingParams]
    templates: Sequence[Any]
    ids: list[bytes]
    width: int


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
    limit = min(layout.sizes.token_limit, vocab_size or layout.sizes.token_limit, 2**31)
    if together and not layout.declared and len(requests) > FEW:
        for places, columns in _columns(requests, layout, limit, native):
            admitted = _packed(columns, layout)
            taken(admitted)
            if isinstance(places, range):
                found[places.start : places.stop] = admitted.requests
            else:
                for at, one in zip(places, admitted.requests, strict=True):
                    found[at] = one
    return [_alone(requests[at], alone) if one is None else one for at, one in enumerate(found)]


def _alone(request: Request, admit: Alone) -> Admitted:
    try:
        return admit(request)
    except InvalidValue as refused:
        return refused


def _columns(
    requests: Sequence[Request], layout: StateLayout, limit: int, native: NativeColumns | None
) -> Iterator[tuple[Sequence[int], _Columns]]:
    """Yield, part by part, the indices and the columns of the requests that can be packed together: new ones whose
    parameters, lengths and ids fit. A part keeps the interpreter's lock."""
    begin, longest = 0, layout.sizes.max_model_len
    while begin < len(requests):
        part = requests[begin : begin + AT_ONCE]
        found = None if native is None else native.of_requests(part, Request, limit, longest, MOST_IDS)
        if found is not None and all(templates := _templates(layout, found[1])):
            end = begin + len(templates)
            yield range(begin, end), _Columns(found[0], found[1], templates, found[2], 4)
        else:
            end = begin + len(part)
            yield from _columns_of(enumerate(part, begin), layout, limit)
        begin = end


_fields = attrgetter("request_id", "prompt", "params", "output", "extra", "role")
_LISTS = {list, tuple, np.ndarray}


def _columns_of(
    requests: Iterable[tuple[int, Request]], layout: StateLayout, limit: int
) -> Iterator[tuple[Sequence[int], _Columns]]:
    plain = [(at, *_fields(one)) for at, one in requests if type(one) is Request]
    if plain and not _are_plain(layout, plain):
        plain = [one for one in plain if _are_plain(layout, [one])]
    ends, begin = [*itertools.accumulate([len(one[2]) for one in plain], initial=0)], 0
    while begin < len(plain):
        end = max(begin + 1, bisect(ends, ends[begin] + MOST_IDS) - 1)
        places, names, prompts, params, *_ = zip(*plain[begin:end], strict=True)
        begin, ids = end, ids_of(prompts, limit)
        if ids is not None:
            yield places, _Columns(names, params, _templates(layout, params), *ids)


def _are_plain(layout: StateLayout, requests: Sequence[tuple[Any, ...]]) -> bool:
    _, _, prompts, params, outputs, extras, roles = zip(*requests, strict=True)
    try:
        return (
            not any(map(len, outputs))
            and not any(extras)
            and roles.count(SplitRole.MIXED) == len(roles)
            and {*map(type, prompts)} <= _LISTS
            and 0 < min(map(len, prompts)) <= max(map(len, prompts)) < layout.sizes.max_model_len
            and all(_templates(layout, params))
        )
    except TypeError:  # one without a length
        return False


def _packed(columns: _Columns, layout: StateLayout) -> AdmittedColumns:
    names, params, templates, own, width = columns
    totals = [len(one) // width for one in own]
    serials = [*itertools.islice(admission.admission_ids, len(names))]
    made = np.frombuffer(bytearray(b"".join([one.packed for one in templates])), layout.admission_dtype)
    records = made["record"]
    records["request_serial"] = made["admission_id"] = serials
    records["prompt_lens"] = made["row_lengths"][:, TOKENS] = totals
    records["seed"] = admission.draw_seeds([*map(_seed, params)], names)
    packed, same = made.tobytes(), itertools.repeat
    lists = [one.lists for one in templates]
    each = [one for (one,) in iter_unpack(f"{made.itemsize}s", packed)]
    head = names, serials, own, totals, same(0), params, same(SplitRole.MIXED), totals, same(layout.config_key)
    bad, lengths, stops = map(b"".join, zip(*lists, strict=True))
    return AdmittedColumns([*map(AdmittedRequest, *head, each, lists)], packed, (bad, lengths, stops), own, width)


@dataclass(frozen=True, slots=True)
class _ParamsTemplate:
    """What admission packs of sampling parameters alone: a request's row and record, and its lists."""

    packed: bytes
    lists: tuple[bytes, bytes, bytes]


_values = attrgetter(*(name for name in SamplingParams.__slots__ if name != "seed"))
"""All parameters but the seed, which is mixed with each request's name."""
_seed = attrgetter("seed")
_known: dict[tuple[int, Any], _ParamsTemplate] = {}
MOST_KNOWN = 4096
"""Most parameters whose packed parts are kept; then all are dropped."""


def _templates(layout: StateLayout, params: Sequence[SamplingParams]) -> list[_ParamsTemplate | None]:
    """Return what is packed of each; None for one that does not fit a state's bounds. Many requests share them."""
    keys = [*map(id, params)]
    made = {key: _template(layout, one) for key, one in dict(zip(keys, params, strict=True)).items()}
    return [*map(made.__getitem__, keys)]


def _template(layout: StateLayout, params: SamplingParams) -> _ParamsTemplate | None:
    key = layout.config_key, _values(params)
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        if (found := _made(layout, params)) is not None:
            _known[key] = found
    return found


def _made(layout: StateLayout, params: SamplingParams) -> _ParamsTemplate | None:
    request = Request("r", (0,), params)
    try:
        admission.check_lists(request, layout)
    except InvalidValue:
        return None
    stops, longest = len(params.stop_sequences), layout.sizes.max_stop_length
    lengths = len(params.bad_words), stops, stops * longest, 0, 0
    record = admission.packed(request, layout, lengths, 0, 0, 0)
    return _ParamsTemplate(record, lists_of(params.bad_words, params.stop_sequences, longest))


def ids_of(prompts: Sequence[Any], limit: int) -> tuple[list[bytes], int] | None:
    """Return the ids of each prompt as bytes, and the bytes of one: int32 or int64. None if one of them is no list of
    ids, or has an id below 0 or not below ``limit``."""
    kinds = {one.dtype if type(one) is np.ndarray and one.ndim == 1 else None for one in prompts}
    width = 8 if kinds == {np.dtype(np.int64)} else 4
    try:
        own = [one.tobytes() if width == 8 else _as_int32(one) for one in prompts]
    except (error, ValueError, TypeError):
        return None
    return (own, width) if within(np.frombuffer(b"".join(own), f"i{width}"), limit) else None


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
