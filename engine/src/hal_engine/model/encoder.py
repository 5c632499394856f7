"""Encoder of texts in a process of its own, with limits on processor time and memory.

A native call of a tokenizer can be ended in no other way than with its process. The process is started when it is first
needed, is ended by the kernel at its limit, and is started anew for the next text. Its standard input is its tie to
this process: it ends when that closes, whatever it computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence

from hal_core import HalError, InvalidValue, Unavailable

from hal_engine.children import environment
from hal_engine.timeouts import TIMEOUTS

ROOM, ROOM_OF_A_BYTE = 1 << 30, 1 << 10
"""Bytes of memory for a text, and further bytes for each byte of it."""
REQUEST, ANSWER = struct.Struct("<dQ?Q"), struct.Struct("<?Q")
"""Of some texts: seconds, bytes of memory, whether they get special tokens, and the bytes that follow. Of the answer:
whether ids follow, or an error, and its bytes. Texts, and the ids of each, follow as a list by :func:`packed`."""
_CHILD = "from hal_engine.model.encoder_process import main; main()"
_MIB = 1 << 20


def packed(parts: Sequence[bytes]) -> bytes:
    """Return a list of bytes as one: its length, that of each part (8 bytes each), and the parts."""
    return array("Q", [len(parts), *map(len, parts)]).tobytes() + b"".join(parts)


def unpacked(data: bytes) -> Iterator[bytes]:
    """Give the parts of a packed list."""
    count = int.from_bytes(data[:8], sys.byteorder)
    begin = 8 * (count + 1)
    for size in array("Q", data[8:begin]):
        yield data[begin : begin + size]
        begin += size


class Encoder:
    """Encodes with the tokenizer of ``content``, a ``tokenizer.json``, for one thread at a time; others wait in turn.

    ``source``: names the file in errors. ``trusted``: whether its patterns are known, so that a text alone can be too
    long.
    """

    def __init__(self, content: bytes, source: str, *, trusted: bool) -> None:
        self._content, self._source, self._trusted = content, source, trusted
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: not a fork of it
        self._at_end: weakref.finalize[[subprocess.Popen[bytes], int], Encoder] | None = None
        self._closed = self._generation = 0  # how often it was closed, now and when the process was started

    def encode(self, texts: Sequence[bytes], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of texts in UTF-8. Raises :class:`InvalidValue` that names the file, or the prompt, for texts
        that exceed a limit or fail in native code; :class:`Unavailable` if the process was ended."""
        nbytes, body = sum(map(len, texts)), packed(texts)
        seconds, room = TIMEOUTS.tokenizer + TIMEOUTS.tokenizer_mib * nbytes / _MIB, ROOM + ROOM_OF_A_BYTE * nbytes
        closed = self._closed
        with self._lock:
            if closed != self._closed:
                raise Unavailable("the tokenizer was closed", cure="send the prompt again later", argument="prompt")
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            head = b""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(REQUEST.pack(seconds, room, add_special_tokens, len(body)) + body)
                process.stdin.flush()
                head = process.stdout.read(ANSWER.size)
            if len(head) == ANSWER.size:
                found, size = ANSWER.unpack(head)
                answer = process.stdout.read(size)
                if len(answer) == size:
                    if found:
                        return [array("I", ids).tolist() for ids in unpacked(answer)]
                    raise self._refused(f"fails: {answer.decode(errors='replace')}")
            self._forget()
            raise self._error(process.returncode, seconds, nbytes, closed=closed != self._closed)

    def close(self) -> None:
        """End the process, and the text that it encodes; a later text starts another one."""
        self._closed += 1
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()

    def _forget(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            _end(self._process)
        if self._at_end is not None:
            self._at_end.detach()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        made = self._owner, self._generation
        if self._process is None or made != (os.getpid(), self._closed) or self._process.poll() is not None:
            self._forget()
            self._owner, self._generation = os.getpid(), self._closed
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # native code prints its own report of a failure
                env=environment() | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._at_end = weakref.finalize(self, _end_own, self._process, self._owner)
            with contextlib.suppress(BrokenPipeError):  # found when the text is sent
                self._process.stdin.write(struct.pack("<Q", len(self._content)) + self._content)
        return self._process

    def _error(self, status: int, seconds: float, nbytes: int, *, closed: bool) -> HalError:
        long = f"{nbytes} bytes of text take"
        if status == -signal.SIGXCPU:
            most = f"more than {seconds:g} s of processor time"
            if self._trusted:
                return InvalidValue(f"{long} {most} to encode", cure="shorten it", argument="prompt")
            return self._refused(f"takes {most} for a prompt: a regular expression of it backtracks")
        if status in (1, -signal.SIGABRT):
            most = f"more than {ROOM >> 30} GiB of memory"
            if self._trusted:
                return InvalidValue(f"{long} {most} to encode", cure="shorten it", argument="prompt")
            return self._refused(f"takes {most} for a prompt: its normalizer makes texts longer")
        how = "was closed" if closed else f"ended with status {status} while it encoded a prompt"
        return Unavailable(f"the tokenizer's process {how}", cure="send the prompt again later", argument="prompt")

    def _refused(self, what: str) -> InvalidValue:
        return InvalidValue(what, cure="mend its patterns, or use another checkpoint", argument=self._source)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Take the status of a process that has ended, or is to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TIMEOUTS.tidying)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _end_own(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        _end(process)
