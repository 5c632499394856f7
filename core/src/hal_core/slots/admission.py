"""Requests and their admission, which checks a request once and packs the data for its slot."""

from __future__ import annotations

import itertools
import zlib
from array import array as ints
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
from msgspec import field
from msgspec.structs import replace

from ..errors import HalError, InvalidValue
from ..memory.convert import convert
from .fields import ROW_FIELDS, Field, SplitRole
from .layout import ADMISSION_ID, CONFIG_KEY, REQUEST_ROW, TOKENS_LEFT, Placed, StateLayout
from .native_columns import NativeColumns
from .request_ids import check_request_id
from .sampling_params import SamplingParams as SamplingParams
from .sampling_params import check_number

Int64s = np.ndarray[Any, np.dtype[np.int64]]
admission_ids = itertools.count(1)
"""Source of the ids of all requests that this process admits."""


class Request(msgspec.Struct, frozen=True):
    """A user's request: token ids of the prompt and parameters of generation. ``msgspec.structs.replace`` makes another
    of it.

    ``output`` holds tokens generated before, when a preempted request is resumed. ``extra`` has the values of a state's
    declared fields (:class:`hal_core.StateField`), by their names. ``priority``: requests with a lower one are served
    first; a slot does not hold it.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    output: Sequence[int] = ()
    role: SplitRole = SplitRole.MIXED
    extra: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0

    def __post_init__(self) -> None:
        check_request_id(self.request_id)
        if not isinstance(self.params, SamplingParams):
            raise InvalidValue(
                f"params = {self.params!r}", cure="give SamplingParams(…), or leave it out", argument="params"
            )
        if not isinstance(self.role, SplitRole):
            raise InvalidValue(f"role = {self.role!r}", cure="give a SplitRole, or leave it out", argument="role")
        if type(self.extra) is not dict and not isinstance(self.extra, Mapping):  # the abstract class is slow
            raise InvalidValue(f"extra = {self.extra!r}", cure="give a dict of field names to values", argument="extra")
        if type(self.priority) is not int or not -(2**31) <= self.priority < 2**31:
            cure = "give a whole number of 32 bits, or leave it out"
            raise InvalidValue(f"priority = {self.priority!r}", cure=cure, argument="priority")


class AdmittedRequest(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """A request that fits a state's sizes, packed for its slot. Made by :func:`admit`; immutable.

    - ``admission_id``: identifies this stay of the request in a slot; a resumed request has a new one.
    - ``ids``: all token ids, the prompt's ``prompt_len`` and the ``generated`` ones, as bytes of int64, or of int32.
    - ``total``: tokens known so far, prompt and generated.
    - ``config_key``: the sizes it was checked against (``StateLayout.config_key``).
    - ``packed``: its :data:`hal_core.slots.layout.REQUEST_ROW` and record (``StateLayout.admission_dtype``), as bytes;
      values that depend on the moment of insertion (lengths, blocks, drafts) are set then.
    - ``lists``: the bytes of the first three of ``ROW_FIELDS``: bad words, lengths of stop sequences, stop sequences.
    - ``companions``: the same request packed for each companion of the state with fields of its own.
    """

    request_id: str
    admission_id: int
    ids: bytes
    prompt_len: int
    generated: int
    params: SamplingParams
    role: SplitRole
    total: int
    config_key: int
    packed: bytes
    lists: tuple[bytes, bytes, bytes]
    companions: tuple[AdmittedRequest, ...] = ()

    @property
    def request_row(self) -> bytes:
        """The part of ``packed`` before the record."""
        return self.packed[:_ROW_BYTES]

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths of its rows, in the order of ``ROW_FIELDS``, the block table's 0."""
        return _LENGTHS.unpack_from(self.packed)

    @property
    def tokens(self) -> Int64s:
        """All token ids, int64 ``[total]``, read-only."""
        return np.frombuffer(widened(self.ids, self.total), np.int64)

    @property
    def rows(self) -> tuple[bytes | memoryview, ...]:
        """The bytes of each of ``ROW_FIELDS``; the block table is empty, as its blocks come with the task."""
        return *self.lists, b"", widened(self.ids, self.total)

    def __copy__(self) -> NoReturn:
        """Refuse to be copied, as :meth:`__reduce__`."""
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: the admission id, and devices' data under it, are valid only in this
        process."""
        raise InvalidValue(
            f"the admitted request {self.request_id!r} belongs to the process that admitted it",
            cure="send the Request, and admit it where it is inserted",
            argument="request",
        )


def admit(
    request: Request,
    layout: StateLayout,
    *,
    vocab_size: int | None = None,
    companions: Sequence[StateLayout] = (),
    native: NativeColumns | None = None,
) -> AdmittedRequest:
    """Check ``request`` against the sizes of a state, and pack it; ``companions``: layouts of companions with their own
    fields; ``native``: a device's functions for it, if any.

    Raises :class:`InvalidValue`, naming the request and the cure, for an empty or too long prompt, for tokens that are
    not whole numbers of at least 0 (and below the state's ``vocab_size``, or a lower one that is given), for lists
    longer than the state's bounds, and for a declared field without a valid value. An invalid request does not affect
    any other request.
    """
    _check_admission(request, layout, vocab_size)
    if request.extra:
        _check_extra(request, (layout, *companions))
    sizes, params = layout.sizes, request.params
    ids, prompt_len, largest = _tokens(request, native)
    total = len(ids) >> 3
    _check_lengths(request, prompt_len, total - prompt_len, layout)
    limit = min(sizes.token_limit, vocab_size or sizes.token_limit)
    if largest >= limit:
        raise InvalidValue(
            f"token {largest} is outside the vocabulary of {limit}",
            cure="tokenize with the model's own tokenizer",
            argument=f"request {request.request_id!r}",
        )
    admission_id, stops = next(admission_ids), len(params.stop_sequences)
    row_lengths = (len(params.bad_words), stops, stops * sizes.max_stop_length, 0, total)
    known = row_lengths, admission_id, prompt_len, total - prompt_len
    admitted = AdmittedRequest(
        request_id=request.request_id,
        admission_id=admission_id,
        ids=ids,
        prompt_len=prompt_len,
        generated=total - prompt_len,
        params=params,
        role=request.role,
        total=total,
        config_key=layout.config_key,
        packed=packed(request, layout, *known),
        lists=lists_of(params.bad_words, params.stop_sequences, sizes.max_stop_length),
    )
    if not companions:
        return admitted
    own = [replace(admitted, packed=packed(request, one, *known), config_key=one.config_key) for one in companions]
    return replace(admitted, companions=tuple(own))


def widened(ids: bytes, count: int) -> bytes | memoryview:
    """Return ``count`` ids, of int32 or int64, as int64 bytes.

    They are converted as one structure, which NumPy counts as one element: for many it would release the interpreter's
    lock.
    """
    if len(ids) == 8 * count:
        return ids
    wide = np.empty(count, np.int64)
    wide.view([("ids", "<i8", (count,))])[:] = np.frombuffer(ids, [("ids", "<i4", (count,))])
    wide.flags.writeable = False
    return wide.data.cast("B")


@lru_cache(maxsize=256)
def lists_of(
    bad_words: tuple[int, ...], stop_sequences: tuple[tuple[int, ...], ...], longest: int
) -> tuple[bytes, bytes, bytes]:
    """Return the rows of bad words, of the lengths of stop sequences, and of stop sequences padded to ``longest``. Many
    requests have the same ones."""
    padded = [[*sequence, *[-1] * (longest - len(sequence))] for sequence in stop_sequences]
    rows = ints("q", bad_words), ints("i", map(len, stop_sequences)), ints("q", itertools.chain.from_iterable(padded))
    bad, lengths, stop = (row.tobytes() for row in rows)
    return bad, lengths, stop


def _check_admission(request: Request, layout: StateLayout, vocab_size: int | None) -> None:
    """Refuse arguments of another type."""
    if not isinstance(request, Request):
        raise InvalidValue(f"{type(request).__name__} is not a Request", cure="make a Request", argument="request")
    if not isinstance(layout, StateLayout):
        raise InvalidValue(f"{type(layout).__name__} is not a layout", cure="give state.layout", argument="layout")
    if vocab_size is not None:
        check_number("vocab_size", vocab_size, 1, integer=True)


def _check_extra(request: Request, layouts: Sequence[StateLayout]) -> None:
    """Refuse a value without a field in the state or its companions."""
    known: set[str] = set()
    for layout in layouts:
        if layout.extras is None:
            return
        known |= layout.extras
    if unknown := sorted(map(str, request.extra.keys() - known)):
        raise InvalidValue(
            f"extra has {', '.join(unknown)}, but the state declares {', '.join(sorted(known)) or 'no field'}",
            cure="declare the fields with device.state(sizes, fields=[…]), or leave the values out",
            argument=f"request {request.request_id!r}",
        )


AT_ONCE = 500
"""Elements of an array that one NumPy call handles: for more it releases the GIL, which a busy thread then keeps for
5 ms."""


def _tokens(request: Request, native: NativeColumns | None) -> tuple[bytes, int, int]:
    """Return all token ids as int64 bytes, the number of those of the prompt, and the largest id. Native code reads
    plain lists and arrays."""
    if native is not None and (found := native.of_ids(request.prompt, request.output)) is not None:
        return found
    prompt, output = _ids_of(request, request.prompt, "prompt"), _ids_of(request, request.output, "output")
    tokens, largest = _copied(prompt, output)
    if largest >= 2**31:
        raise _no_ids(request, "output" if _copied(prompt, ())[1] < 2**31 else "prompt")
    return tokens.tobytes(), len(prompt), largest


def _ids_of(request: Request, values: object, name: str) -> Any:  # noqa: ANN401 (an array of some kind)
    """Return the token ids as an array of whole numbers, which may be the caller's; floats and bools are refused."""
    array: Any = values  # a NumPy array, or an object to make one of
    if not isinstance(values, np.ndarray):
        try:
            array = np.array(values)
        except (TypeError, ValueError):  # a ragged list, or an object that cannot be an array
            raise _no_ids(request, name) from None
    if array.size == 0:
        return ()
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _no_ids(request, name)
    return array


def _copied(*parts: Any) -> tuple[Int64s, int]:  # noqa: ANN401 (arrays of whole numbers)
    """Return all ids in a new array, as the caller's may change, and the largest; a negative one counts as 2**63 or
    more."""
    tokens, at, largest = np.empty(sum(map(len, parts)), np.int64), 0, 0
    unsigned = tokens.view(np.uint64)
    for part in parts:
        for begin in range(0, len(part), AT_ONCE):
            piece = part[begin : begin + AT_ONCE]
            end = at + len(piece)
            tokens[at:end] = piece
            largest = max(largest, int(np.maximum.reduce(unsigned[at:end])))
            at = end
    return tokens, largest


def _no_ids(request: Request, name: str) -> InvalidValue:
    return InvalidValue(
        f"{name} must be one list of token ids, whole numbers from 0 to 2**31 - 1",
        cure="give the ids that the model's own tokenizer makes, one flat list a request",
        argument=f"request {request.request_id!r}",
    )


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
        raise InvalidValue(f"{generated} tokens are already generated", cure="raise max_tokens", argument=who)
    check_lists(request, layout)


def check_lists(request: Request, layout: StateLayout) -> None:
    """Refuse parameters whose lists are longer than a state's bounds."""
    sizes, params, who = layout.sizes, request.params, f"request {request.request_id!r}"
    longest = max(map(len, params.stop_sequences), default=0)
    for name, count, bound in (
        ("stop_sequences", len(params.stop_sequences), sizes.max_stop_sequences),
        ("the longest stop sequence", longest, sizes.max_stop_length),
        ("bad_words", len(params.bad_words), sizes.max_bad_words),
        ("eos_token_ids", len(params.eos_token_ids), sizes.max_eos),
        ("logprobs", params.logprobs or 0, sizes.max_logprobs),
    ):
        if count > bound:
            raise InvalidValue(f"{name}: {count} exceeds the state's bound of {bound}", cure="use less", argument=who)


class _Packing(NamedTuple):
    """Admission's result for a layout (``layout.admission_dtype``) as numbers for ``struct``: those of an empty slot,
    and the index of each field of the record among them."""

    pack: Callable[..., bytes]
    empty: tuple[int | float | bool, ...]
    at: dict[str, int]


_CODES = dict(
    zip(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"], "?bhiqBHIQefd", strict=True)
)
"""The code of :mod:`struct` for a NumPy kind and its bytes."""
_ROW_BYTES = REQUEST_ROW.itemsize
ROW_NUMBERS = _ROW_BYTES // 8
_LENGTHS = Struct(f"={len(ROW_FIELDS)}q")
_packings: dict[int, _Packing] = {}


def _packing_of(layout: StateLayout) -> _Packing:
    found = _packings.get(layout.config_key)
    if found is None:
        codes, empty, at = "<" + "q" * ROW_NUMBERS, [0] * ROW_NUMBERS, {}
        empty[CONFIG_KEY] = layout.config_key
        for name in layout.record_dtype.names or ():
            place = layout.fields[name]
            storage = place.field.dtype.storage
            at[name] = len(empty)
            codes += _CODES[f"{storage.kind}{storage.itemsize}"] * place.width
            empty += [storage.type(place.field.reset).item()] * place.width
        made = Struct(codes)
        assert made.size == layout.admission_dtype.itemsize
        found = _packings[layout.config_key] = _Packing(made.pack, tuple(empty), at)
    return found


def empty_record(layout: StateLayout) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return a record of an empty slot, shape ``[1]``: every field at its reset value."""
    packing = _packing_of(layout)
    return np.frombuffer(packing.pack(*packing.empty), layout.admission_dtype)["record"].copy()


GOLDEN = 0x9E37_79B9_7F4A_7C15
"""The 64-bit golden ratio of Knuth's multiplicative hashing."""


def draw_seed(seed: int, request_id: str) -> int:
    """Return the seed of a request's draws, mixed from its seed and its name, 0 to 2**63 - 1; draws also depend on the
    position."""
    return (seed ^ (zlib.crc32(request_id.encode()) * GOLDEN)) & (2**63 - 1)


def draw_seeds(seeds: Sequence[int], request_ids: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return :func:`draw_seed` of each."""
    codes = np.array([*map(zlib.crc32, map(str.encode, request_ids))], np.uint64)
    mixed = np.array(seeds, np.uint64) ^ codes * np.uint64(GOLDEN)
    return (mixed & np.uint64(2**63 - 1)).view(np.int64)


def packed(
    request: Request,
    layout: StateLayout,
    row_lengths: tuple[int, ...],
    admission_id: int,
    prompt_len: int,
    generated: int,
) -> bytes:
    """Return the request's row and record: its parameters by the slot table, the rest by name, all else as in an empty
    slot.

    One call packs all numbers, as NumPy takes 0.3 us for each field that is set.
    """
    packing, params = _packing_of(layout), request.params
    at, numbers = packing.at, [*packing.empty]
    numbers[:ADMISSION_ID], numbers[ADMISSION_ID] = row_lengths, admission_id
    numbers[TOKENS_LEFT] = 1 if request.role is SplitRole.PREFILL else params.max_tokens - generated
    for name, param in layout.param_fields:
        numbers[at[name]] = getattr(params, param)
    numbers[at["request_serial"]], numbers[at["prompt_lens"]], numbers[at["step_idx"]] = (
        admission_id,
        prompt_len,
        generated,
    )
    numbers[at["stop_flags"]], numbers[at["split_role"]] = False, int(request.role)
    numbers[at["seed"]] = draw_seed(params.seed, request.request_id)
    numbers[at["logprobs_num"]] = -1 if params.logprobs is None else params.logprobs
    if ends := params.eos_token_ids:
        first = at["eos_token_ids"]
        numbers[at["eos_num"]], numbers[first : first + len(ends)] = len(ends), ends
    numbers[at["stop_seqs_num"]], numbers[at["bad_words_num"]] = len(params.stop_sequences), len(params.bad_words)
    if layout.declared:
        fill_declared(numbers, at, request, layout.declared)
    return packing.pack(*numbers)


def fill_declared(numbers: list[Any], at: Mapping[str, int], request: Request, places: Sequence[Placed]) -> None:
    """Put the request's values of declared fields among the numbers of its record; ``at``: the index of each field."""
    for place in places:
        given, begin = _given(place.field, request), at[place.field.name]
        try:
            count = 1 if place.width == 1 and not hasattr(given, "__len__") else len(given)
            if count > place.width:
                raise InvalidValue(f"{count} values are more than its width of {place.width}", cure="give fewer")
            numbers[begin : begin + count] = convert(given, place.field.dtype, (count,)).tolist()
        except HalError as error:
            raise _refused(request, place.field, error.what, error.cure) from error
        except TypeError as error:  # it has no length
            raise _refused(request, place.field, f"{type(given).__name__} is no row", "give a list") from error


def _given(declared: Field, request: Request) -> Any:  # noqa: ANN401 (what the request or its function gives)
    if callable(declared.source):
        try:
            return declared.source(request)
        except Exception as error:
            what = f"its function failed: {type(error).__name__}: {error}"
            raise _refused(request, declared, what, "mend the function, or the request") from error
    try:
        return request.extra[declared.name]
    except KeyError:
        cure = f"give Request(extra={{{declared.name!r}: …}})"
        raise _refused(request, declared, "the request has no value", cure) from None


def _refused(request: Request, declared: Field, what: str, cure: str) -> HalError:
    return InvalidValue(f"field {declared.name}: {what}", cure=cure, argument=f"request {request.request_id!r}")
