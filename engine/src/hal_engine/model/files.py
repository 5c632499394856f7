"""Files of a checkpoint, and formats of others."""

from __future__ import annotations

import stat
from pathlib import Path

from hal_core import InvalidValue

_TAKEN = ".safetensors"
_FORMATS = {
    ".gguf": "GGUF",
    ".bin": "pickles of PyTorch",
    ".pth": "pickles of PyTorch",
    ".pt": "pickles of PyTorch",
    ".h5": "HDF5",
    ".msgpack": "Flax's",
    ".onnx": "ONNX",
}
"""Names of formats of weights that are not taken, by the ends of their files' names."""


def check_formats(given: Path) -> None:
    """Raise InvalidValue if ``given`` is a file, or a folder with weights in formats that are not taken alone."""
    cure = "give a folder with config.json, tokenizer.json and .safetensors files"
    if given.is_file():
        named = _FORMATS.get(given.suffix.lower())
        what = "is a file, no folder" if named is None else f"is a file in a format that is not taken ({named})"
        raise InvalidValue(f"{str(given)!r} {what}", cure=cure, argument="--model")
    try:
        suffixes = {file.suffix.lower(): file.name for file in given.iterdir()}
    except OSError:  # reading the configuration raises the reason
        return
    others = sorted(suffixes.keys() & _FORMATS.keys())
    if others and _TAKEN not in suffixes:
        found = f"weights are in a format that is not taken: {suffixes[others[0]]} ({_FORMATS[others[0]]})"
        raise InvalidValue(found, cure=cure, argument=str(given))


def check_regular(path: Path) -> None:
    """Raise InvalidValue for a pipe, a device or a folder, as opening a pipe may never return. A missing file is not
    refused here."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it raises the reason
        return
    if not stat.S_ISREG(mode):
        raise InvalidValue("is not a regular file", cure="put the file itself there", argument=str(path))


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises ``InvalidValue`` for one that does not fit into memory, as a sparse one of
    1 TB, and ``OSError``."""
    try:
        return path.read_bytes()
    except MemoryError:
        what = f"its {path.stat().st_size} bytes do not fit into memory"
        raise InvalidValue(what, cure="restore the file", argument=str(path)) from None
