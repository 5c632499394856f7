"""Count the lines of code of each room: lines that hold code, without docstrings, comments and blanks.

python tools/code_lines.py                   hal_core by room, and the other packages of the product
python tools/code_lines.py core/src/hal_core/devices     the files below a folder, the longest first
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core/src/hal_core"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
"""Tokens that are not code on their own."""


def code_lines(text: str) -> int:
    """Lines of a module that hold code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def counted(folder: Path) -> dict[Path, int]:
    """Lines of code of each module below a folder."""
    return {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def main(arguments: list[str]) -> None:
    """Print the table."""
    if arguments:
        folder = ROOT / arguments[0]
        for path, count in sorted(counted(folder).items(), key=lambda item: -item[1]):
            print(f"{count:6d}  {path.relative_to(ROOT)}")
        return
    rooms: Counter[str] = Counter()
    for path, count in counted(CORE).items():
        parts = path.relative_to(CORE).parts
        rooms[parts[0] if len(parts) > 1 else "."] += count
    for room, count in rooms.most_common():
        print(f"{count:6d}  hal_core/{room}")
    print(f"{sum(rooms.values()):6d}  hal_core")
    for folder in (
        ROOT / "hal",
        ROOT / "conformance/src/hal_conformance",
        *sorted(ROOT.glob("plugins/*/src")),
        *sorted(ROOT.glob("runners/*/src")),
    ):
        print(f"{sum(counted(folder).values()):6d}  {folder.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
