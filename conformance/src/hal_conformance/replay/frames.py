"""The file of a recording: a line with its version and origin, then a gzip stream of MessagePack frames.

Each frame is a tagged array with its length before it (4 bytes, little-endian). The file of a killed run can be read,
but for its last :data:`PERIOD`. The stream's end and checksum show that a file is whole. A recording has no times,
addresses or admission ids: equal runs give equal files.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, Literal, cast

import msgspec
from hal_core import FrameError, Group, InvalidValue, Request, StateConfig, TaskKind
from hal_core.frames.bodies import decode_body

MAGIC, VERSION = b"hal recording ", 3
PERIOD = 0.1
"""Seconds between two writes to the file."""
_PIECE = 1 << 16

FieldRow = tuple[str, str, int, float, str, Literal["extra"] | None, bool]
"""A field that the worker declared: the arguments of :class:`hal_core.StateField`, its value "extra" or None."""
TaskRow = tuple[TaskKind, int, int, int, int, list[int], int, int, list[int]]
"""A task: the arguments of :class:`hal_core.Task`, the request by its number."""
StepRow = tuple[int, dict[str, list[int]], bool, Group, int | None, dict[int, str], dict[int, str]]
"""A step: the arguments of :class:`hal_core.Step`."""


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all frames. A call's tag is the name of the method."""


class State(Frame, tag="state"):
    """A slot state. ``companions``: the arguments of :class:`hal_core.Companion`."""

    name: str
    sizes: StateConfig
    fields: list[FieldRow]
    companions: list[tuple[str, list[FieldRow], bool]]


class OfState(Frame):
    """Base of frames about a state, named by its place among the states of the file, from 0."""

    state: int


class Admitted(OfState, tag="request"):
    """A request, as admitted; later frames name it by its place among the requests of the file, from 0."""

    request: Request


class Release(OfState, tag="release"):
    """Slots that are free since the call before."""

    slots: list[int]


class Record(OfState, tag="record"):
    """A step's record as ``save_output`` encoded it; ``taken``: the worker took it with ``state.take``."""

    number: int
    taken: bool
    body: bytes


class Call(OfState):
    """Base of calls."""


class Insert(Call, tag="insert_tasks"):
    tasks: list[TaskRow]


class SetValue(Call, tag="async_set_value"):
    """``value``: bytes of one element that fills (``fills``) or of the whole target; None: a value on the device."""

    offset: int
    shape: list[int]
    strides: list[int]
    dtype: str
    fills: bool
    value: bytes | None


class Broadcast(Call, tag="broadcast_tokens"):
    """In a group of several ranks."""

    group: Group


class Update(Call, tag="update_inputs"):
    step: StepRow


class Drafts(Call, tag="set_drafts"):
    """After step ``number``: slot to its drafts."""

    number: int
    drafts: dict[int, list[int]]


class Save(Call, tag="save_output"):
    step: StepRow


class Reads(Call, tag="order_after_reads"):
    """For the state's memory."""


AnyFrame = State | Admitted | Release | Record | Insert | SetValue | Broadcast | Update | Drafts | Save | Reads


def _plain(value: Any) -> object:  # noqa: ANN401 (a number or array of NumPy's, a read-only mapping, or a sequence)
    if hasattr(value, "items"):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else [*value]


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(AnyFrame).decode


def tag_of(frame: Frame) -> str:
    """Return the name of a frame."""
    return str(type(frame).__struct_config__.tag)


class Writer:
    """Writes frames into a file. A thread of its own makes, encodes, compresses and writes them every :data:`PERIOD`.
    The worker's thread appends their parts.

    The stream is compressed in pieces of equal size, so that a file's bytes do not depend on when it was written. What
    is shorter than a piece is written with a copy of the compressor, and written over by the next piece.

    ``error``: the first one, of the thread or of the caller; later frames are not written.
    """

    def __init__(self, path: Path, origin: str) -> None:
        if path.is_file() and path.stat().st_size and not _begins(path):
            what, cure = f"{path} exists, and is no recording", "give another name, or remove it"
            raise InvalidValue(what, cure=cure, argument="--record")
        self.error: Exception | None = None
        self._path, self._file = path, cast("BinaryIO", path.open("wb", buffering=0))
        self._zip, self._rest, self._at = zlib.compressobj(1, wbits=31), bytearray(), 0
        self._given = deque[tuple[Callable[..., Frame], tuple[object, ...]]]()
        try:
            self._at = self._put_out(MAGIC + f"{VERSION} {origin}\n".encode())
        except OSError:  # a full disk, or a pipe
            self._file.close()
            raise
        self._closing = Event()
        self._thread = Thread(target=self._run, name="hal-recording", daemon=True)
        self._thread.start()

    def put(self, make: Callable[..., Frame], *given: object) -> None:
        """Append the frame ``make(*given)``, which is made later: ``given`` must not change."""
        self._given.append((make, given))

    def close(self) -> None:
        """Write the remaining frames, and the stream's end if there was no error; then close the file, and raise the
        error."""
        self._closing.set()
        self._thread.join()
        self._file.close()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._closing.wait(PERIOD):
                if self._given:
                    self._write(zlib.Z_SYNC_FLUSH)
            self._write(zlib.Z_FINISH if self.error is None else zlib.Z_SYNC_FLUSH)
        except Exception as error:  # noqa: BLE001 (raised by close)
            self.error = self.error or error

    def _write(self, flush: int) -> None:
        """Make the frames, and write all whole pieces and the rest. To compress a piece releases the GIL, so that the
        worker waits for at most a piece's frames."""
        for _ in range(len(self._given)):
            make, given = self._given.popleft()
            data = encode(make(*given))
            self._rest += len(data).to_bytes(4, "little") + data
            while len(self._rest) >= _PIECE:
                self._at = self._put_out(self._zip.compress(self._rest[:_PIECE]))
                del self._rest[:_PIECE]
        tail = self._zip.copy()
        self._put_out(tail.compress(self._rest) + tail.flush(flush))

    def _put_out(self, data: bytes) -> int:
        """Write after the whole pieces, cut the file there, and return its new length."""
        left, at, file = memoryview(data), self._at, self._file.fileno()
        try:
            while left:
                done = os.pwrite(file, left, at)
                left, at = left[done:], at + done
            if os.fstat(file).st_size > at:
                os.ftruncate(file, at)
        except OSError as error:
            error.filename = str(self._path)
            raise
        return at


def _begins(path: Path) -> bool:
    """Return whether a file begins as a recording of any version."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class InvalidRecording(InvalidValue):
    """A file that cannot be replayed."""


_AGAIN, _GIVE = "record again: hal run --record FILE", "give a file of hal run --record FILE"


class Recording:
    """A file that is read. ``origin``: the device on which it was recorded, and hal's release.

    :raises InvalidRecording: naming the field, for a foreign or newer file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise self._refused("file", "is no file" if path.exists() else "does not exist", _GIVE)
        with path.open("rb") as file:
            self._line = file.readline(1 << 10)
        number, _, self.origin = self._line.removeprefix(MAGIC).decode(errors="replace").strip().partition(" ")
        if not self._line.startswith(MAGIC) or not number.isdecimal():
            raise self._refused("magic", f"is {self._line[:16]!r}: not a recording", _GIVE)
        if int(number) != VERSION:
            cure = "install the kit of the hal that recorded it (pip install ./core ./conformance)"
            raise self._refused("version", f"is {number}, but this kit reads {VERSION}", cure)

    def frames(self, calls: int | None = None) -> Iterator[AnyFrame]:
        """Yield the frames; with ``calls``, up to so many calls, whether or not the file is whole.

        :raises InvalidRecording: naming the field, for a damaged or truncated file, and for a frame that names a
            state, a request or a step that no frame before it has.
        """
        before, seen = Counter[object](), 0
        with self.path.open("rb") as file, gzip.open(file) as stream:
            file.seek(len(self._line))
            try:
                if not file.peek(1):
                    raise EOFError  # gzip takes it for a whole stream
                while size := stream.read(4):
                    frame = _decode(stream.read(int.from_bytes(size, "little")))
                    seen += isinstance(frame, Call)
                    if calls is not None and seen > calls:
                        return
                    if problem := _problem_of(frame, before):
                        field, _, what = problem.partition(" ")
                        raise self._refused(f"{tag_of(frame)}.{field}", what, _AGAIN)
                    before.update(_names_of(frame))
                    yield frame
            except EOFError:
                if calls is None or seen < calls:
                    cure = f"give --calls {seen} to replay the calls that are whole, or " * bool(seen) + _AGAIN
                    raise self._refused("end", f"is missing: the file is truncated after call {seen}", cure) from None
            except (zlib.error, gzip.BadGzipFile) as error:
                raise self._refused("stream", f"is damaged after call {seen}: {error}", _AGAIN) from None
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise self._refused(f"frame {before[Frame]}", f"is not valid: {error}", _AGAIN) from None

    def _refused(self, field: str, what: str, cure: str) -> InvalidRecording:
        return InvalidRecording(f"{self.path}: {field} {what}", cure=cure, argument="--replay")


def _names_of(frame: AnyFrame) -> list[object]:
    """Return what later frames may count on: the frame's kind, and the step whose output it saved."""
    return [Frame, type(frame), *([(frame.state, frame.step[0])] if isinstance(frame, Save) else [])]


def _problem_of(frame: AnyFrame, before: Counter[object]) -> str:
    """Return the fault of a frame with valid types, or ""."""
    if isinstance(frame, State):
        return ""
    if frame.state not in range(before[State]):
        return f"state is {frame.state}, and {before[State]} states come before it"
    if isinstance(frame, Insert):
        unknown = [row[2] for row in frame.tasks if row[2] not in range(before[Admitted])]
        return f"tasks names request {unknown[0]}, and {before[Admitted]} requests come before it" if unknown else ""
    if isinstance(frame, Record):
        if not before[frame.state, frame.number]:
            return f"number is {frame.number}, and no save_output of that step comes before it"
        try:
            decode_body(memoryview(frame.body))
        except FrameError as error:
            return f"body is not valid: {error}"
    return ""
