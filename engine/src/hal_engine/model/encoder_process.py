"""The process of :class:`hal_engine.model.encoder.Encoder`. It imports no framework."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import resource
import select
import signal
import struct
import sys
import threading
from array import array
from pathlib import Path
from typing import BinaryIO, NoReturn

from tokenizers import Tokenizer

from .encoder import ANSWER, REQUEST, packed, unpacked


def main() -> NoReturn:
    """Encode texts from standard input until it closes."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # hal run holds it back while it opens an engine
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    (size,) = struct.unpack("<Q", _read(source, 8))
    backend = Tokenizer.from_buffer(_read(source, size))
    backend.no_truncation()
    backend.no_padding()
    while True:
        seconds, room, special, size = REQUEST.unpack(_read(source, REQUEST.size))
        texts = [text.decode() for text in unpacked(_read(source, size))]
        _limit(seconds, room)
        try:  # without the interpreter's lock, so that the thread can end the process
            found = backend.encode_batch_fast(texts, add_special_tokens=special)
            good, answer = True, packed([array("I", one.ids).tobytes() for one in found])
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # noqa: BLE001 (a panic of Rust's is no Exception)
            good, answer = False, str(error).encode()
        answers.write(ANSWER.pack(good, len(answer)) + answer)
        answers.flush()


def _end_with_input() -> None:
    """End the process as soon as nobody holds the other end of its standard input."""
    closed = select.poll()
    closed.register(0, 0)  # POLLHUP alone
    while not closed.poll():
        pass
    os._exit(0)


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        os._exit(0)
    return data


def _limit(seconds: float, nbytes: int) -> None:
    """Set the limits for the next texts, relative to the current usage."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + math.ceil(seconds)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    for kind, limit in ((resource.RLIMIT_CPU, until), (resource.RLIMIT_AS, pages * resource.getpagesize() + nbytes)):
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError):  # the user's lower limit remains
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
