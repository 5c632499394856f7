"""The file with the key for records over tcp: ``hal tail`` creates it, ``hal run --sink`` reads a copy of it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from hal_core import InvalidValue

from .curve import CurveKeys
from .urls import is_loopback, scheme_of

_COPY = "hal tail makes it; copy it to the other host"
_MOST = 1024
"""Characters of a file that are read: a key has far fewer."""


def record_keys(url: str, file: Path | None, *, make: bool = False) -> CurveKeys | None:
    """Return the keys that encrypt records to ``url``; None without a file, within one host.

    ``make``: create the file if it is missing. Raises :class:`InvalidValue` for another host without a file, and for a
    file with another scheme than tcp. It also raises for a file that cannot be read, that others may read, or that
    holds no key.
    """
    tcp = scheme_of(url) == "tcp"
    if file is None:
        if not tcp or is_loopback(url):
            return None
        cure = "give --key FILE, the same file to hal run --sink and hal tail, which makes one"
        raise InvalidValue(f"{url!r} goes over the network, and there is no key", cure=cure, argument="--key")
    if not tcp:
        raise InvalidValue(f"{url!r} is private by its folder", cure="leave it out", argument="--key")
    try:
        return _read(file, make=make)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidValue):
            raise
        what = f"{file} is no key: {getattr(error, 'strerror', None) or error}"
        raise InvalidValue(what, cure=f"give another file ({_COPY})", argument="--key") from error


def _read(file: Path, *, make: bool) -> CurveKeys:
    if make and not file.parent.is_dir():
        cure = f"make it, or name another file ({_COPY})"
        raise InvalidValue(f"there is no folder {file.parent}", cure=cure, argument="--key")
    if file.is_dir():
        raise InvalidValue(f"{file} is a folder", cure=f"name a file in it ({_COPY})", argument="--key")
    if file.exists() and not file.is_file():  # a pipe, from which a read may never end
        raise InvalidValue(f"{file} is no regular file", cure=f"name another ({_COPY})", argument="--key")
    if make and not file.exists():
        _make(file)
    if file.is_file() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise InvalidValue(f"others may read {file}", cure=f"chmod 600 {file}", argument="--key")
    with file.open(encoding="ascii") as opened:
        return CurveKeys.shared(opened.read(_MOST).strip())


def _make(file: Path) -> None:
    """Write a new key atomically. If another process does so at the same time, its key is used."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)  # mode 0600
    try:
        with open(descriptor, "w") as made:
            made.write(CurveKeys.new().secret + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)
