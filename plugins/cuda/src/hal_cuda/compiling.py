"""Kernel compilation: once by NVRTC for the present GPU, cached on disk, loaded into the context."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.resources import files
from pathlib import Path

from hal_core import Unavailable

SOURCES = ("writes.cu", "enter.cu", "update.cu")


def source(name: str) -> str:
    """Return the text of a kernel file of this package, after the common part."""
    folder = files("hal_cuda") / "kernels"
    return "".join([(folder / part).read_text(encoding="utf-8") for part in ("bytes.cuh", name)])


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``HAL_CACHE``, else in the user's cache folder."""
    base = os.environ.get("HAL_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paddle-hal" / "cuda"
    except RuntimeError as error:  # Python's, without HOME and an entry of the user
        raise Unavailable(f"no folder for kernels: {error}", cure="set HAL_CACHE", device="cuda") from error


def cubin(name: str, arch: str) -> bytes:
    """Return the machine code of a kernel file for ``arch`` ("sm_90"), from the cache or newly compiled.

    If the result cannot be stored, the next process compiles again. Raises :class:`Unavailable` without a compiler.
    """
    text = source(name)
    key = hashlib.sha256(f"{arch}|{_compiler()}|{text}".encode()).hexdigest()[:32]
    path = cache_folder() / f"{name.removesuffix('.cu')}-{arch}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_source(text, arch)
    _keep(path, code)
    return code


def compile_source(text: str, arch: str) -> bytes:
    """Compile CUDA C++ to machine code by NVRTC, through cuda-core."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:
        from cuda.core.experimental import Program, ProgramOptions  # cuda-core before 0.5
    try:
        made = Program(text, "c++", ProgramOptions(std="c++17", arch=arch)).compile("cubin")
    except (RuntimeError, ImportError, OSError) as error:
        raise Unavailable(
            f"NVRTC cannot compile for {arch}: {str(error).splitlines()[0]}",
            cure="pip install './plugins/cuda[cu13]' (or [cu12]) in hal's checkout: an NVRTC that supports this chip",
            device="cuda",
        ) from error
    return bytes(made.code)


def _compiler() -> str:
    """Return the compiler's name and version, for the file's name."""
    from importlib.metadata import PackageNotFoundError, version

    names = []
    for name in ("cuda-core", "cuda-bindings"):
        try:
            names.append(version(name))
        except PackageNotFoundError:
            names.append("-")
    return "|".join(names)


def _keep(path: Path, code: bytes) -> None:
    """Write the file completely or not at all, since several processes may write it at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            with (made := Path(folder, path.name)).open("wb") as file:
                file.write(code)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut may leave an empty file of that name
            made.replace(path)
    except OSError:
        return  # with a read-only or full disk every start compiles again
