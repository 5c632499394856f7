"""Build of the simulated accelerator with the machine's C++ compiler, once, into a cache folder.

Two libraries: the simulator itself (``libhalsim.so``, without Paddle) and the Paddle device on top of it, one for each
installed Paddle version. A build is named after all its inputs, so a stale one is never used.

    python -m hal_sim     builds both and prints their paths
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hal_core import HalError, Unavailable

NATIVE = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra")
CORE_NAME = "libhalsim.so"
DEVICE_NAME = "libhal_sim_device.so"
WORTH_PRECOMPILING = 6  # files; for fewer, parsing the standard headers beforehand costs more than it saves


class NoCompiler(Unavailable):
    """This machine has no C++ compiler."""

    def __init__(self, tried: Sequence[str]) -> None:
        super().__init__(
            f"no C++ compiler found (tried {', '.join(tried)})",
            cure="install g++ (for example: apt-get install g++), or name one in the variable CXX",
            device="sim",
        )


class NoPaddle(Unavailable):
    """Paddle is not installed, or without the headers that a device needs."""

    def __init__(self, what: str) -> None:
        super().__init__(what, cure="pip install 'paddlepaddle>=3.1,<3.4'", device="sim")


class BuildFailed(HalError, RuntimeError):
    """The compiler failed; the text is its output."""


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str


@dataclass(frozen=True)
class Paddle:
    folder: Path
    version: str


def compiler() -> Compiler:
    """Return the compiler named in ``CXX``, else the first of the usual ones."""
    named = os.environ.get("CXX")
    return _compiler((named,) if named else ("g++", "c++", "clang++"), os.environ.get("PATH", ""))


@cache
def _compiler(names: Sequence[str], path: str) -> Compiler:
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
            if version.returncode == 0:
                return Compiler(found, version.stdout.splitlines()[0])
    raise NoCompiler(names)


def installed_paddle() -> Paddle:
    """Return Paddle's folder and version without importing it, as the device must be announced before the import."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        raise NoPaddle("paddle is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "include/paddle/phi/backends/device_ext.h").is_file():
        raise NoPaddle(f"the installed paddle at {folder} has no header files")
    match = re.search(r"full_version\s*=\s*'([^']+)'", (folder / "version/__init__.py").read_text())
    return Paddle(folder, match.group(1) if match else "unknown")


def cache_folder() -> Path:
    """Return ``HALSIM_CACHE``, or a folder of this user."""
    named = os.environ.get("HALSIM_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paddle-hal-sim"
    except RuntimeError as error:  # Python's, without HOME and an entry of the user
        raise BuildFailed(f"no folder for builds: {error}", cure="set HALSIM_CACHE", device="sim") from error


def core_library() -> Path:
    """Return the simulator's path, after building it if necessary."""
    sources = [p for p in sorted(NATIVE.glob("*.cc")) if not p.name.startswith("paddle_")]
    headers = [p for p in sorted(NATIVE.glob("*.h")) if not p.name.startswith("paddle_")]
    link = (f"-Wl,-soname,{CORE_NAME}", "-lpthread", "-lrt")
    return _built("core", CORE_NAME, sources, headers, (), link, "")


def found_build() -> str:
    """Return the compiler's version, or the path of an existing build, without building. Raises :class:`NoCompiler`."""
    try:
        return compiler().version
    except NoCompiler:
        return f"no compiler, but {core_library()}"


def paddle_device(paddle: Paddle | None = None) -> Path:
    """Return the path of the device for the installed Paddle; ``CUSTOM_DEVICE_ROOT`` must name its folder."""
    core = core_library()
    paddle = paddle or installed_paddle()
    sources = sorted(NATIVE.glob("paddle_*.cc"))
    headers = sorted(NATIVE.glob("*.h"))
    include = ("-isystem", str(paddle.folder / "include"))
    libs = paddle.folder / "libs"
    link = (
        f"-L{core.parent}",
        "-lhalsim",
        f"-Wl,-rpath,$ORIGIN/../{core.parent.name}",
        f"-L{libs}",
        "-lphi_core",
        f"-Wl,-rpath,{libs}",
    )
    return _built(f"paddle-{paddle.version}", DEVICE_NAME, sources, headers, include, link, str(paddle.folder))


def _built(
    title: str,
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path],
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    salt: str,
) -> Path:
    # the machine, as one home may be that of several
    salted = FLAGS, tuple(compile_flags), tuple(link_flags), salt, platform.machine()
    digest = hashlib.sha256(repr(salted).encode())
    for file in (*sources, *headers):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    stem, cache_root = f"{title}-{digest.hexdigest()[:16]}", cache_folder()
    try:
        with_compiler = compiler()
    except NoCompiler:
        for found in sorted(cache_root.glob(f"{stem}-????????/{name}")):
            return found  # built when a compiler was installed
        raise
    folder = cache_root / f"{stem}-{hashlib.sha256(repr(with_compiler).encode()).hexdigest()[:8]}"
    library = folder / name
    if library.is_file():
        return library
    try:
        cache_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(cache_root / f"{folder.name}.lock"):
            if not library.is_file():
                _build(with_compiler, folder, name, sources, compile_flags, link_flags)
    except OSError as error:
        raise BuildFailed(
            f"the cache folder {cache_root} cannot be used: {error}", cure="set HALSIM_CACHE", device="sim"
        ) from error
    return library


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one process build; others wait for it and use the result."""
    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(
    with_compiler: Compiler,
    folder: Path,
    name: str,
    sources: Sequence[Path],
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        objects = [work / f"{source.stem}.o" for source in sources]
        standard = _precompiled(with_compiler, work) if len(sources) > WORTH_PRECOMPILING else ()

        def compile_one(pair: tuple[Path, Path]) -> str:
            source, target = pair
            return _run([with_compiler.path, *FLAGS, *standard, *compile_flags, "-c", str(source), "-o", str(target)])

        # The largest first, so that the last one to finish is a small one.
        pairs = sorted(zip(sources, objects, strict=True), key=lambda p: -p[0].stat().st_size)
        with ThreadPoolExecutor(max_workers=max(2, len(os.sched_getaffinity(0)))) as pool:
            log = "".join(pool.map(compile_one, pairs))
        command = [with_compiler.path, "-shared", *map(str, objects), "-o", str(work / name), *link_flags]
        log += _run(command)
        for leftover in (*objects, *work.glob("standard.h*")):
            leftover.unlink()
        (work / "build.log").write_text(log)
        with (work / name).open("rb") as library:
            os.fsync(library.fileno())  # otherwise a power cut may leave the folder with an empty library
        shutil.rmtree(folder, ignore_errors=True)  # what a cleaner of old files left of it
        os.replace(work, folder)  # the whole folder appears at once, or not at all
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _precompiled(with_compiler: Compiler, work: Path) -> Sequence[str]:
    """Return the flags that use the standard headers, parsed once: this saves a third of the whole build's time."""
    header = work / "standard.h"
    shutil.copyfile(NATIVE / "standard.h", header)
    command = [with_compiler.path, *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    done = subprocess.run(command, capture_output=True, check=False)
    return () if done.returncode else ("-include", str(header))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(
            f"{command[0]} failed:\n{done.stderr.strip()[-4000:]}",
            cure="the simulator needs C++17 and Linux; name another compiler in the variable CXX",
            device="sim",
        )
    return done.stderr
