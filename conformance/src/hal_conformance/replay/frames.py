"""The file of a recording: a line with its version and origin, then a gzip stream of MessagePack frames.

Each frame is an array of a name, a state's number and an array of values, with its length before it (4 bytes,
little-endian). The stream's end and checksum show that a file is whole.
"""

from __future__ import annotations

import fcntl
import gzip
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
from hal_core import Group, InvalidValue, Request, StateConfig, TaskKind

MAGIC, VERSION = b"hal recording ", 4
PERIOD = 0.1
"""Seconds between two writes to the file: what a killed run loses at most."""
_PIECE = 1 << 16

FieldRow = tuple[str, str, int, int | float | bool, str, Literal["extra"] | None, bool]
"""A field that the worker declared: the arguments of :class:`hal_core.StateField`, its value "extra" or None."""
TaskRow = tuple[TaskKind, int, int, int, int, list[int], int, int, list[int]]
"""A task: the arguments of :class:`hal_core.Task`, the request by its place among the requests of the file, from 0."""
StepRow = tuple[int, dict[str, list[int]], bool, Group, int | None, dict[int, str], dict[int, str]]
"""A step: the arguments of :class:`hal_core.Step`."""

EVENTS: dict[str, Any] = {
    # A new state: name, sizes, declared fields, and the arguments of each hal_core.Companion.
    "state": tuple[str, StateConfig, list[FieldRow], list[tuple[str, list[FieldRow], bool]]],
    "request": tuple[Request],  # as admitted
    "release": tuple[list[int]],  # slots that are free since the call before
    # A step's number, whether the worker took its record with state.take, and the record as save_output encoded it.
    "record": tuple[int, bool, bytes],
}
"""Kinds of frames besides calls, and their values."""
CALLS: dict[str, Any] = {
    "insert_tasks": tuple[list[TaskRow]],
    # The view of the state (offset, shape, strides, type); bytes of one element that fills (True) or of the whole
    # target; None: a value on the device.
    "async_set_value": tuple[int, tuple[int, ...], tuple[int, ...], str, bool, bytes | None],
    "broadcast_tokens": tuple[Group],
    "update_inputs": tuple[StepRow],
    "set_drafts": tuple[int, dict[int, list[int]]],  # after a step's number: slot to its drafts
    "save_output": tuple[StepRow],
    "order_after_reads": tuple[()],  # of the state's memory
}
"""The calls of an opened device that change a state, and their arguments."""


class Frame(NamedTuple):
    """A call or another event. ``state``: the place of its slot state among the states of the file, from 0."""

    name: str
    state: int
    given: Any


def _plain(value: Any) -> object:  # noqa: ANN401 (a number or array of NumPy's, a read-only mapping, or a sequence)
    if hasattr(value, "items"):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else [*value]


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(tuple[str, int, msgspec.Raw]).decode
_DECODE = {name: msgspec.msgpack.Decoder(kind).decode for name, kind in (EVENTS | CALLS).items()}


class Writer:
    """Writes frames into a file. A thread of its own makes, encodes, compresses and writes them every :data:`PERIOD`.
    The worker's thread appends their parts. The file is locked; an earlier recording is in it until the first frame.

    As a context manager it keeps an error of its block instead of raising it. ``error``: the first one, of the thread
    or of a block; later frames are not written, and the stream has no end.
    """

    def __init__(self, path: Path, origin: str) -> None:
        self.error: Exception | None = None
        self._path, self._zip, self._closing = path, zlib.compressobj(1, wbits=31), Event()
        self._given = deque[tuple[Callable[..., Frame], tuple[object, ...]]]()
        self._thread = Thread(target=self._run, name="hal-recording", daemon=True)
        self._head, self._file = MAGIC + f"{VERSION} {origin}\n".encode(), path.open("a+b")
        wrong, regular = "exists, and is no recording", path.is_file()
        try:
            if regular:  # several runs may write to /dev/null
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            wrong *= regular and self._file.read(len(MAGIC)) not in (b"", MAGIC)
        except BlockingIOError:
            wrong = "is being written by another run"
        if wrong:
            self._file.close()
            raise InvalidValue(f"{path} {wrong}", cure="give another name", argument="--record")
        self._thread.start()

    def put(self, make: Callable[..., Frame], *given: object) -> None:
        """Append the frame ``make(*given)``, which is made later: ``given`` must not change."""
        if self.error is None and not self._closing.is_set():
            self._given.append((make, given))

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep an error of the block; an observer's would only be logged. A full disk's does not name the file."""
        if isinstance(error, OSError):
            error.filename = str(self._path)
        if isinstance(error, Exception):
            self.error = self.error or error
        return isinstance(error, Exception)

    def close(self) -> None:
        """Write the remaining frames, and the stream's end if there was no error; then raise the error."""
        self._closing.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        with self, self._file as file:
            while not self._closing.wait(PERIOD):
                if self._given:
                    self._write(file, zlib.Z_SYNC_FLUSH)
            if self._given or not self._head:
                self._write(file, zlib.Z_SYNC_FLUSH if self.error else zlib.Z_FINISH)

    def _write(self, file: BinaryIO, flush: int) -> None:
        """Make and write the frames. Compressing a piece releases the GIL for the worker."""
        data = bytearray()
        if self._head:
            if file.seek(0, 2):  # a device has no length
                file.truncate(0)
            file.write(self._head)
            self._head = b""
        for _ in range(len(self._given)):
            make, given = self._given.popleft()
            frame = encode(make(*given))
            data += len(frame).to_bytes(4, "little") + frame
            if len(data) >= _PIECE:
                file.write(self._zip.compress(data))
                data.clear()
        file.write(self._zip.compress(data) + self._zip.flush(flush))
        file.flush()


_AGAIN, _GIVE = "record again: hal run --record FILE", "give a file of hal run --record FILE"


class Recording:
    """A file that is read. ``origin``: the device on which it was recorded, and hal's release. Raises
    :class:`InvalidValue` that names the field, for a foreign or newer file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise self._refused("file", "is no file" if path.exists() else "does not exist", _GIVE)
        with path.open("rb") as file:
            self._line = file.readline(1 << 10)
        number, _, self.origin = self._line.removeprefix(MAGIC).decode(errors="replace").strip().partition(" ")
        if not self._line.startswith(MAGIC) or not number.isdecimal():
            what = f"is {self._line[:16]!r}: not a recording" if self._line else "is missing: no call was recorded"
            raise self._refused("magic", what, _GIVE)
        if int(number) != VERSION:
            cure = "install the kit of the hal that recorded it (pip install ./core ./conformance)"
            raise self._refused("version", f"is {number}, but this kit reads {VERSION}", cure)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames. Raises :class:`InvalidValue` with the number of whole calls, if damaged or truncated."""
        calls = 0
        with self.path.open("rb") as file, gzip.open(file) as stream:
            file.seek(len(self._line))
            try:
                if not file.peek(1):
                    raise EOFError  # gzip takes it for a whole stream
                while size := stream.read(4):
                    name, state, given = _decode(stream.read(int.from_bytes(size, "little")))
                    yield Frame(name, state, _DECODE[name](given))
                    calls += name in CALLS
            except EOFError:
                raise self._refused("end", f"is missing: the file is truncated after call {calls}", _AGAIN) from None
            except (zlib.error, gzip.BadGzipFile) as error:
                raise self._refused("stream", f"is damaged after call {calls}: {error}", _AGAIN) from None
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
                raise self._refused("frame", f"after call {calls} is not valid: {error}", _AGAIN) from None

    def _refused(self, field: str, what: str, cure: str) -> InvalidValue:
        return InvalidValue(f"{self.path}: {field} {what}", cure=cure, argument="--replay")
