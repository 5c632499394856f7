"""Build of the cuda device's native part, in place or into a wheel: ``python -m hal_cuda.building``.

It runs a C compiler once (``CC``, else the one that built Python, else ``cc``), with Python's own headers. The limited
API makes one file serve Python 3.11 and later. Only the standard library is used, because the build of a wheel loads
this file by its path.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / "native"
NAME = "_native.abi3.so"
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")
ERRORS = ("-Werror=incompatible-pointer-types",)
"""Warnings that are errors, as they are for GCC 14."""


class NotBuilt(Exception):
    """The native part could not be built; the text is the reason in one line."""


def sources_digest() -> str:
    """Return the SHA-256 of these sources, its first 16 hexadecimal digits."""
    text = b"".join([file.name.encode() + b"\0" + file.read_bytes() for file in sorted(FOLDER.glob("*.[ch]"))])
    return hashlib.sha256(text).hexdigest()[:16]


def build(target: Path) -> Path:
    """Compile into the folder ``target`` and return the file. Raise :class:`NotBuilt` with the reason, leaving no
    file."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise NotBuilt(f"Python's headers are missing (no Python.h in {include})")
    made, part = target / NAME, target / f"{NAME}.{os.getpid()}"
    named = f'-DHAL_SOURCES="{sources_digest()}"'
    files = [str(file) for file in sorted(FOLDER.glob("*.c"))]
    try:
        command = [*compiler(), *FLAGS, *ERRORS, named, f"-I{include}", *files, "-o", str(part)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            errors = [line for line in found.stderr.splitlines() if "error" in line] or [
                "the compiler printed no message"
            ]
            raise NotBuilt(f"the compiler failed ({' '.join(command[:1])}): {errors[0].strip()}")
        part.replace(made)
    except OSError as error:
        raise NotBuilt(f"no C compiler: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return made


def compiler() -> list[str]:
    """Return the command line of the C compiler."""
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    words = shlex.split(named)
    if not os.environ.get("CC") and shutil.which(words[0]) is None:
        return ["cc"]
    return words


def main() -> int:
    """Build beside this file."""
    try:
        print(f"built {build(HERE)}")
    except NotBuilt as error:
        print(f"hal: the native part of the cuda device was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
