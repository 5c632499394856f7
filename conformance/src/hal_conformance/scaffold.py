"""A new package for a device or a runner, from the templates beside this file: ``hal new-plugin``, ``new-runner``."""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import re
from collections.abc import Collection, Iterator
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from hal_core.errors import InvalidValue

KINDS = ("async", "sync", "paddle", "torch")
"""Kinds of devices: a runtime with streams, one without, a CustomDevice of Paddle's, and a device type of torch's."""
RUNNER = "runner"
"""The kind of a package with a runner of hal's engine."""
_BASES = {"paddle": "paddle", "torch": "torch_device"}
"""The folder in ``plugins/`` of a kind's base."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40
"""Characters of a name: it becomes part of file names and of environment variables."""
_PLACES = {"package": "src/hal_{name}", "github": ".github"}
"""Folders of the templates whose name in the made package is another."""


def make(name: str, kind: str, folder: Path, taken: Collection[str] = ()) -> list[str]:
    """Write a plugin of ``kind`` for a device ``name``, or a runner ``name``, into a folder; return the paths in it.

    The folder must be missing or empty. If anything fails, nothing of it is left. ``taken``: names of devices, or
    runners, that are installed.

    :raises InvalidValue: for a name, a kind or a folder that cannot be used, with the cure.
    """
    check_name(name, taken, RUNNER if kind == RUNNER else "device")
    if kind not in (*KINDS, RUNNER):
        raise InvalidValue(f"{kind!r} is no kind of device", cure=f"give {', '.join(KINDS)}", argument="kind")
    check_folder(folder)
    files = render(name, kind)
    made: list[Path] = []
    try:
        for path, text in files.items():
            target = folder / path
            for one in [*reversed(target.parents)][-len(Path(path).parents) :]:
                if not one.is_dir():
                    one.mkdir()
                    made.append(one)
            with target.open("x", encoding="utf-8") as stream:
                made.append(target)
                stream.write(text)
    except BaseException as error:
        for one in reversed(made):  # what somebody else has made there meanwhile remains
            with contextlib.suppress(OSError):
                one.rmdir() if one.is_dir() else one.unlink()
        if isinstance(error, FileExistsError):
            what = f"{error.filename} was made meanwhile"
            raise InvalidValue(what, cure="name a new or empty folder with --into", argument="into") from error
        raise
    return [*files]


def check_name(name: str, taken: Collection[str] = (), kind: str = "device") -> None:
    """Raise :class:`InvalidValue` for a name that cannot be a device's (or a runner's), a module's and a
    distribution's."""
    cure = "give another name"
    if not _NAME.fullmatch(name):
        what = f"{name!r} is no name for a {kind}"
        cure = "give small letters, digits and single underscores, with a letter first, such as mychip"
    elif len(name) > _LONGEST:
        what = f"the name has {len(name)} characters, at most {_LONGEST} are possible"
    elif keyword.iskeyword(name) or keyword.issoftkeyword(name):
        what = f"{name!r} is a keyword of Python"
    elif name in taken:
        what, cure = f"a {kind} {name!r} is installed", "give another name, or uninstall that plugin"
    elif importlib.util.find_spec(f"hal_{name}") is not None:
        what = f"a module hal_{name} is installed"
    elif any(_installed(distribution) for distribution in (f"hal-{name}", f"paddle-hal-{name}")):
        what = f"a distribution for {name!r} is installed"
    else:
        return
    raise InvalidValue(what, cure=cure, argument="name")


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_folder(folder: Path) -> None:
    """Raise :class:`InvalidValue` for a folder that is not empty or cannot be made."""
    if folder.is_dir():
        if any(folder.iterdir()):
            cure = "name a new or empty folder with --into"
            raise InvalidValue(f"the folder {str(folder)!r} is not empty", cure=cure, argument="into")
    elif folder.exists() or folder.is_symlink():
        raise InvalidValue(f"{str(folder)!r} is no folder", cure="name another one with --into", argument="into")
    elif not folder.parent.is_dir():
        what = f"the folder {str(folder.parent)!r} does not exist"
        raise InvalidValue(what, cure="make it first, or name another one with --into", argument="into")


def render(name: str, kind: str) -> dict[str, str]:
    """Return path and text of each file of a package."""
    core = metadata.version("paddle-hal-core").split(".")
    contract = f">={core[0]}.{core[1]},<{int(core[0]) + 1}"
    base = _BASES.get(kind, "")
    words = {
        "name": name,
        "title": "".join(part.capitalize() for part in name.split("_")),
        "upper": name.upper(),
        "contract": contract,
        "base": f', "paddle-hal-{base.replace("_", "-")}>=1.0,<2"' if base else "",
        "base_folder": f" ./hal/plugins/{base}" if base else "",
    }
    parts = (kind,) if kind == RUNNER else ("common", kind)
    root = resources.files("hal_conformance") / "templates"
    texts = {path: found for part in parts for path, found in _texts(root / part, name)}
    return {path: Template(text).substitute(words) for path, text in sorted(texts.items())}


def _texts(folder: Traversable, name: str, before: str = "") -> Iterator[tuple[str, str]]:
    for one in sorted(folder.iterdir(), key=lambda each: each.name):
        if one.is_dir():
            inner = _PLACES.get(one.name, one.name).format(name=name)
            yield from _texts(one, name, f"{before}{inner}/")
        elif one.name.endswith(".txt"):
            yield before + one.name.removesuffix(".txt"), one.read_text(encoding="utf-8")
