"""Write the faces' stubs for type checkers: ``__init__.pyi``, from the table in ``__init__.py`` beside it.

    python tools/faces.py            write the stubs
    python tools/faces.py --check    list stubs that differ from their table; the status is 1 if any does

A face lists its names once, in the table that it gives to :func:`hal_core.lazy.face`; the stub has them as imports.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "core/src/hal_core"
FACES = tuple(CORE / folder / "__init__.py" for folder in (".", "devices", "frames", "handover"))


def table(face: Path) -> dict[str, str]:
    """Module to its names, spaces between: the last argument of the call of ``face``."""
    for node in ast.walk(ast.parse(face.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "face":
            found: dict[str, str] = ast.literal_eval(node.args[-1])
            return found
    raise ValueError(f"{face} calls no face()")


def stub(face: Path) -> str:
    """The stub's text: each name imported from its module, in the order that ruff asks for."""
    package = ["hal_core", *face.parent.relative_to(CORE).parts]
    lines = []
    for module, names in table(face).items():
        parts = module.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(package, parts, strict=False)) if a != b), len(package))
        dots = len(package) - shared
        lines += [(dots, parts[shared:], _rank(name), name) for name in names.split()]
    lines.sort(key=lambda line: (-line[0], *line[1:]))
    imports = [f"from {'.' * (dots + 1)}{'.'.join(rest)} import {name} as {name}" for dots, rest, _, name in lines]
    return "\n".join([f"# Written by tools/faces.py from the table in {face.name}.", *imports, ""])


def _rank(name: str) -> int:
    """Constants, then classes, then functions."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def main(arguments: list[str]) -> int:
    """Write the stubs, or compare them."""
    status = 0
    for face in FACES:
        target, wanted = face.with_suffix(".pyi"), stub(face)
        if arguments != ["--check"]:
            target.write_text(wanted, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != wanted:
            print(f"{target.relative_to(CORE)} is not what its table makes: run python tools/faces.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
