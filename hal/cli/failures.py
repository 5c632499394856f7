"""One-line errors for failures of the user or the system: the cause and the cure."""

from __future__ import annotations

import contextlib
import errno
import sys

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = {"hal_core": "paddle-hal-core", "hal_engine": "paddle-hal-engine", "hal_conformance": "paddle-hal-conformance"}
#: Modules whose distribution has another name.
_DISTRIBUTIONS = {"paddle": "paddlepaddle", "zlib_ng": "zlib-ng"}
_UNKNOWN = "install it"
"""The cure for a module that hal itself does not require."""
_ROOM = "make room there, or set TMPDIR (or XDG_RUNTIME_DIR) to a folder that has some"
_CURES = {
    errno.EMFILE: "raise the limit on open files of this process (ulimit -n), or close some",
    errno.ENFILE: "close files of other processes, or raise the system's limit (sysctl fs.file-max)",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: _ROOM,
    errno.ENOMEM: "end other processes, or raise the limit on memory (ulimit -v)",
    errno.EAGAIN: "end other processes, or raise the limit on their number (ulimit -u)",
}
_OF_OPTIONS = {
    errno.ENOENT: "make its folder, or name another file",
    errno.ENOTDIR: "a part of the path is a file: name another one",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "name a file that you may write, or change its permissions",
}
"""Cures of a file that an option names."""


verbose = False
"""Whether a command prints the traceback of a plugin or runner that failed (``-v``)."""


def message(error: Exception) -> str | None:
    """Return the error line of a command; None for a bug of hal's, which needs its traceback."""
    tree = sys.modules.get(f"{__package__}.tree")
    if tree is not None and isinstance(error, tree.UsageError):
        return str(tree.usage_line(error))
    errors = sys.modules.get("hal_core.errors")  # not imported, so it cannot have been raised
    if errors is not None and isinstance(error, errors.HalError):
        return one_line(error)
    if isinstance(error, ImportError):
        return _import(error)
    if isinstance(error, OSError):
        option, cure = getattr(error, "option", ""), _CURES.get(error.errno or 0, "")
        cure = cure or (_OF_OPTIONS.get(error.errno or 0, "") if option else "")
        what = one_line(error.strerror or error) + _at(error)
        return (f"{option}: " if option else "") + what + (f" ({cure})" if cure else "")
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        what = "no memory is left" if isinstance(error, MemoryError) else "no thread can be started"
        return f"{what} ({_CURES[errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN]})"
    return None


def exit_of(error: Exception) -> SystemExit:
    """Return the exit of a command that an error ended: status 2, or the error's own status."""
    return SystemExit(getattr(error, "exit_status", 2))


def trace(error: Exception) -> str:
    """Return the traceback of a plugin or runner that failed if ``-v`` was given, else ""."""
    is_complete = isinstance(error, ModuleNotFoundError) or hasattr(error, "option")
    is_complete = is_complete or (isinstance(error, OSError) and error.errno in _CURES)
    if not verbose or is_complete:  # the line is complete
        return ""
    from hal_core import trace_of

    return trace_of(error)


@contextlib.contextmanager
def as_typed(**names: str) -> Iterator[None]:
    """Rename the arguments of errors to the options as typed: ``names`` maps inner arguments to options. The hook in
    which the error was found is left out."""
    try:
        yield
    except Exception as error:
        if (name := names.get(getattr(error, "argument", None) or "")) is not None:
            error.argument, error.hook = name, ""  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def of_option(option: str) -> Iterator[None]:
    """Have errors of the operating system name the option whose file they are about."""
    try:
        yield
    except OSError as error:
        error.option = option  # type: ignore[attr-defined]
        raise


def check_seconds(number: float, option: str = "--timeout") -> None:
    """Raise :class:`hal_core.InvalidValue` if an option's seconds are out of range."""
    from hal_core import InvalidValue

    if not 0.1 <= number <= 86_400:
        raise InvalidValue(f"{number:g}", cure="give seconds from 0.1 to 86400", argument=option)


def one_line(what: object) -> str:
    """Return the text with each run of white space as one blank."""
    return " ".join(str(what).split())


def cure_of(module: str) -> str:
    """Return the command that installs a module's distribution, with the requirement from hal's own metadata."""
    if module in _OURS:
        return f"it comes with hal: pip install ./{_OURS[module].removeprefix('paddle-hal-')} in hal's checkout"
    name = _DISTRIBUTIONS.get(module, module)
    for line in _requirements():
        stated = line.partition(";")[0].strip()
        if stated.lower().startswith(name) and not stated[len(name) : len(name) + 1].isalnum():
            more = ""
            if module == "paddle":
                more = " setuptools, or a build of Paddle for your accelerator; --runner torch needs none"
            return f"pip install '{stated}'{more}"
    return _UNKNOWN


def _requirements() -> list[str]:
    from importlib import metadata  # 25 ms that --help does not need

    found: list[str] = []
    for distribution in ("paddle-hal", "paddle-hal-engine", "paddle-hal-core", "paddle-hal-conformance"):
        try:
            found += metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:  # a source tree on the path
            continue
    return found


def _import(error: ImportError) -> str:
    name = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not name:
        return f"{error.name or 'a module'} cannot be imported: {one_line(error)} ({_cure_of_broken(name)})"
    if error.name != name:
        return f"{name} is installed, but has no module {error.name} ({_cure_of_broken(name)})"
    return f"the Python package {name!r} is not installed ({cure_of(name)})"


def _cure_of_broken(module: str) -> str:
    """Return the cure for an installed module that cannot be imported. Only hal's own requirements are to be
    reinstalled."""
    cure = cure_of(module)
    return "-v shows who imports it" if cure == _UNKNOWN else f"reinstall it: {cure}"


def _at(error: OSError) -> str:
    named = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f": {' -> '.join(named)}" if named else ""
