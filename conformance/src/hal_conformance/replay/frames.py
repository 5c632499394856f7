"""The file format of a recording: a line with its version, then a zlib stream of MessagePack frames.

Each frame is a tagged array with its length before it (4 bytes, little-endian). The file of a killed run can be read,
but for its last :data:`PERIOD`. The stream's checksum and its last frame show that a file is whole. A recording has no
times, addresses or admission ids: equal runs give equal files.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np
from hal_core.errors import InvalidValue
from hal_core.slots.sampling_params import SamplingParams
from hal_core.slots.tasks import TaskKind

MAGIC, VERSION = b"hal recording ", 2
PERIOD = 0.1
"""Seconds between two writes to the file."""
COLUMNS = 8
"""Columns of a batch's tasks in :class:`Insert`; a change of them is a new :data:`VERSION`."""
_PIECE = 1 << 16
OPTION = "--replay"


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Header(Frame, tag="header"):
    """The first frame: the contract's release, and the device that the worker ran on."""

    release: str
    device: str


FieldRow = tuple[str, str, int, float, str, Literal["extra"] | None, bool]
"""A field that the worker declared: the arguments of :class:`hal_core.StateField`, its value "extra" or None."""
CompanionRow = tuple[str, list[FieldRow], bool]
"""A state beside a state: the arguments of :class:`hal_core.Companion`."""
StepRow = tuple[int, dict[str, bytes], bool, tuple[list[int], int], int | None, dict[int, str], dict[int, str]]
"""A step: the arguments of :class:`hal_core.Step`, its orders as bytes of int32, its group as ranks and rank."""


class State(Frame, tag="state"):
    """A slot state; later frames name states by their place in the file, from 0."""

    name: str
    sizes: dict[str, int]
    fields: list[FieldRow]
    companions: list[CompanionRow]


class Admitted(Frame, tag="request"):
    """A request, as admitted; ``number`` counts them from 0. ``tokens``: int64, of which ``prompt`` are its prompt."""

    number: int
    request_id: str
    tokens: bytes
    prompt: int
    params: SamplingParams
    role: int
    extra: dict[str, list[float | int | bool]]


class Call(Frame):
    """Base of calls. ``state``: the number of the state that they change."""

    state: int


class Insert(Call, tag="insert_tasks"):
    """A call of ``insert_tasks``: the numbers of the requests, and ``TaskBatch.ints``."""

    requests: list[int]
    ints: bytes


class SetValue(Call, tag="async_set_value"):
    """A call of ``async_set_value``. ``state`` -1: memory of no state. ``value``: bytes of one element that fills
    (``fills``) or of the whole target; None: a value on the device."""

    offset: int
    shape: list[int]
    strides: list[int]
    dtype: str
    fills: bool
    value: bytes | None


class Broadcast(Call, tag="broadcast_tokens"):
    """A call of ``broadcast_tokens`` in a group of several ranks."""

    ranks: list[int]
    rank: int


class OfStep(Call):
    """Base of calls for a step. ``step`` is None in the file if the state's call before had the same step."""

    step: StepRow | None


class Update(OfStep, tag="update_inputs"):
    """A call of ``update_inputs``."""


class Drafts(Call, tag="set_drafts"):
    """A call of ``set_drafts`` after step ``number``: slot to its drafts."""

    number: int
    drafts: dict[int, list[int]]


class Save(OfStep, tag="save_output"):
    """A call of ``save_output``."""


class Reads(Call, tag="order_after_reads"):
    """A call of ``order_after_reads`` for the state's memory."""


AnyCall = Insert | SetValue | Broadcast | Update | Drafts | Save | Reads


class Release(Frame, tag="release"):
    """Slots that the worker freed before the next call."""

    state: int
    slots: list[int]


class Record(Frame, tag="record"):
    """A step's record as ``save_output`` encoded it; ``taken``: the worker took it with ``state.take``."""

    state: int
    number: int
    taken: bool
    body: bytes


class End(Frame, tag="end"):
    """The last frame of a whole file."""


AnyFrame = Header | State | Admitted | AnyCall | Release | Record | End


def _plain(value: Any) -> object:  # noqa: ANN401 (a number or array of NumPy's, or another sequence)
    return value.tolist() if hasattr(value, "tolist") else [*value]


def encoded(value: object) -> msgspec.Raw:
    """Return a frame's field encoded now, as its owner may change it later."""
    return msgspec.Raw(_encode(value))


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(AnyFrame).decode


TaskRow = tuple[int, int, int, int, list[int], int, int, list[int]]
"""A task: the arguments of :class:`hal_core.Task` without the request."""


def task_rows(frame: Insert) -> list[TaskRow]:
    """Return an insertion's tasks, by the columns of :class:`hal_core.TaskBatch`."""
    n, flat = len(frame.requests), memoryview(frame.ints).cast("i").tolist()
    columns = [flat[at * n : at * n + n] for at in range(COLUMNS)]
    kinds, slots, computed, scheduled, counts, first_blocks, first_tokens, drafted = columns
    rest = iter(flat[COLUMNS * n :])
    blocks, drafts = ([[*islice(rest, count)] for count in column] for column in (counts, drafted))
    return [*zip(kinds, slots, computed, scheduled, blocks, first_blocks, first_tokens, drafts, strict=True)]


def tag_of(frame: Frame) -> str:
    """Return the name of a frame; a call's is that of the method."""
    return str(type(frame).__struct_config__.tag)


class Writer:
    """Writes frames into a file. A thread of its own makes, encodes, compresses and writes them every :data:`PERIOD`.
    The worker's thread appends their parts.

    The stream is compressed in pieces of equal size, so that a file's bytes do not depend on when it was written. What
    is shorter than a piece is written with a copy of the compressor, and written over by the next piece.
    """

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.stat().st_size and not _begins(path):
            what, cure = f"{path} exists, and is no recording", "give another name, or remove it"
            raise InvalidValue(what, cure=cure, argument="--record")
        self._path, self._file = path, cast("BinaryIO", path.open("wb", buffering=0))
        self._zip, self._rest = zlib.compressobj(1), bytearray()
        self._given = deque[tuple[Callable[..., Frame], tuple[object, ...]]]()
        self._end = 0
        self._error: Exception | None = None
        try:
            self._at = self._put_out(MAGIC + b"%d\n" % VERSION, 0)
        except OSError:  # a full disk, or a pipe
            self._file.close()
            raise
        self._closing = Event()
        self._thread = Thread(target=self._write, name="hal-recording", daemon=True)
        self._thread.start()

    def put(self, make: Callable[..., Frame], *given: object) -> None:
        """Append the frame ``make(*given)``, which is made later: ``given`` must not change. Raises the error of an
        earlier frame or write."""
        if self._error is not None:
            raise self._error
        self._given.append((make, given))

    def close(self, *, whole: bool = True) -> None:
        """Write the remaining frames, and the last one if the file is whole; then close it. Raises as :meth:`put`."""
        with self._file:
            if whole:
                self.put(End)
            self._closing.set()
            self._thread.join()
            if self._error is not None:
                raise self._error
            tail = self._zip.compress(self._rest) + self._zip.flush(zlib.Z_FINISH if whole else zlib.Z_SYNC_FLUSH)
            end = self._put_out(tail, self._at)
            if end < self._end:
                self._file.truncate(end)

    def _write(self) -> None:
        try:
            while not self._closing.wait(PERIOD):
                if self._given:
                    self._write_given()
                    tail = self._zip.copy()
                    self._put_out(tail.compress(self._rest) + tail.flush(zlib.Z_SYNC_FLUSH), self._at)
            self._write_given()
        except Exception as error:  # noqa: BLE001 (raised by put or close)
            self._error = error

    def _write_given(self) -> None:
        """Make the frames, and write all whole pieces; keep the rest. To compress a piece releases the GIL, so that
        the worker waits for at most a piece's frames."""
        for _ in range(len(self._given)):
            make, values = self._given.popleft()
            data = _encode(make(*values))
            self._rest += len(data).to_bytes(4, "little") + data
            while len(self._rest) >= _PIECE:
                self._at = self._put_out(self._zip.compress(self._rest[:_PIECE]), self._at)
                del self._rest[:_PIECE]

    def _put_out(self, data: bytes, at: int) -> int:
        """Write at a place of the file; return the place after it."""
        left = memoryview(data)
        while left:
            try:
                done = os.pwrite(self._file.fileno(), left, at)
            except OSError as error:
                error.filename = str(self._path)
                raise
            left, at = left[done:], at + done
        self._end = max(self._end, at)
        return at


def _begins(path: Path) -> bool:
    """Return whether a file begins as a recording of any version."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class InvalidRecording(InvalidValue):
    """A file that cannot be replayed."""


def refused(path: Path, field: str, what: str, cure: str) -> InvalidRecording:
    """Return the error for a field of a file."""
    return InvalidRecording(f"{path}: {field} {what}", cure=cure, argument=OPTION)


_AGAIN, _GIVE = "record again: hal run --record FILE", "give a file of hal run --record FILE"


def frames_of(path: Path, calls: int | None = None) -> Iterator[AnyFrame]:
    """Yield the frames of a file, the header first; with ``calls``, up to so many calls, whether or not it is whole.

    :raises InvalidRecording: naming the field, for a foreign, newer, damaged or truncated file.
    """
    seen, ended, whole, steps = 0, False, False, dict[int, StepRow | None]()
    for number, data in enumerate(_unpacked(path)):
        if data is None:
            whole = ended
            break
        try:
            frame = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise refused(path, f"frame {number}", f"is not valid: {error}", _AGAIN) from None
        if ended or isinstance(frame, Header) != (number == 0):
            raise refused(path, f"frame {number}", f"is {type(frame).__name__}, out of its order", _AGAIN)
        seen += isinstance(frame, Call)
        if calls is not None and seen > calls:
            return
        if isinstance(frame, End):
            ended = True
            continue
        if isinstance(frame, OfStep):
            frame.step = steps[frame.state] = frame.step or steps.get(frame.state)
        if problem := _problem_of(frame):
            raise refused(path, f"frame {number}", problem, _AGAIN)
        yield frame
    if not whole and (calls is None or seen < calls):
        cure = f"give --calls {seen} to replay the calls that are whole, or {_AGAIN}"
        raise refused(path, "end", f"is missing: the file is truncated after call {seen}", cure)


def _problem_of(frame: AnyFrame) -> str:
    """Return what is wrong with a frame whose types are right, or ""."""
    if isinstance(frame, OfStep) and frame.step is None:
        return "has no step, and no call of its state before it has one"
    if isinstance(frame, Insert):
        if len(frame.ints) % 4:
            return f"has {len(frame.ints)} bytes, which are no int32 numbers"
        n, given = len(frame.requests), np.frombuffer(frame.ints, np.int32)
        counts = given[4 * n : 5 * n].sum() + given[7 * n : 8 * n].sum()  # of blocks and drafts
        if len(given) < COLUMNS * n or len(given) != COLUMNS * n + counts:
            return f"has {len(given)} numbers, which are not the columns of {n} tasks"
        if unknown := {*given[:n].tolist()} - {*TaskKind}:
            return f"has the task kind {min(unknown)}, which this kit does not know"
    return ""


def _unpacked(path: Path) -> Iterator[bytes | None]:
    """Yield each frame's bytes, and None at the end of a file that has its whole stream with a right checksum."""
    if not path.is_file():
        raise refused(path, "file", "is no file" if path.exists() else "does not exist", _GIVE)
    with path.open("rb") as file:
        line = file.readline(64)
        version = line.removeprefix(MAGIC).strip()
        if not line.startswith(MAGIC) or not version.isdigit():
            raise refused(path, "magic", f"is {line[:16]!r}: not a recording", _GIVE)
        if int(version) != VERSION:
            cure = "install the kit of the hal that recorded it (pip install ./core ./conformance)"
            raise refused(path, "version", f"is {int(version)}, but this kit reads {VERSION}", cure)
        unzip, rest = zlib.decompressobj(), bytearray()
        while piece := file.read(_PIECE):
            try:
                rest += unzip.decompress(piece)
            except zlib.error as error:
                raise refused(path, "stream", f"is damaged: {error}", _AGAIN) from None
            at = 0
            while at + 4 <= len(rest) and (size := int.from_bytes(rest[at : at + 4], "little")) <= len(rest) - at - 4:
                yield bytes(rest[at + 4 : at + 4 + size])
                at += 4 + size
            del rest[:at]
        if unzip.unused_data:
            raise refused(path, "end", f"is followed by {len(unzip.unused_data)} bytes", _AGAIN)
        if unzip.eof and not rest:
            yield None
