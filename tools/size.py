"""Count what there is to read, by room: ``python tools/size.py`` (``make size``), in any checkout of this repository.

Lines of code files, blank ones and docstrings too, and Python statements: in all, and outside tests and the kit. Then
protocols, timeouts, decisions, and the words of pages that no command writes.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

CODE = ("*.py", "*.c", "*.cc", "*.cpp", "*.cu", "*.cuh", "*.h", "*.cl")
MADE = {"docs/slot-fields.md", "docs/support.md", "docs/timeouts.md", "docs/evidence/nightly.md"}
SPLIT = ("plugins", "runners", "adapters")
"""Folders in which each folder is a room."""


def files(*patterns: str) -> list[Path]:
    """Those of this checkout that git knows."""
    listed = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True)
    return [path for path in map(Path, listed.stdout.splitlines()) if path.exists()]


def main() -> None:
    """Print both tables."""
    rooms, kinds = dict[str, Counter[str]](), Counter[str]()
    for path in files(*CODE):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if path.suffix == ".py" else []
        counts = {"lines": text.count("\n"), "statements": sum(isinstance(node, ast.stmt) for node in nodes)}
        if "tests" not in path.parts and path.parts[0] != "conformance":
            counts |= {f"product {name}": count for name, count in counts.items()}
        folder = "/".join(path.parts[: 1 + (path.parts[0] in SPLIT)]) if len(path.parts) > 1 else "top"
        for room in (folder, "all"):
            rooms.setdefault(room, Counter()).update(counts)
        for node in nodes:
            bases = [ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", [])]
            kinds["protocols"] += "Protocol" in bases
            kinds["timeouts"] += isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Seconds"
    pages = [path for path in files("*.md") if str(path) not in MADE]
    kinds["decisions"] = len(files("docs/decisions/[0-9]*.md"))
    kinds["words of pages"] = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    print(
        f"{'':22} {'in all':^22}  outside tests and the kit\n{'room':<22}", *[f"{'lines':>10} {'statements':>10}"] * 2
    )
    for room, counter in sorted(rooms.items(), key=lambda item: -item[1]["lines"]):
        columns = ("lines", "statements", "product lines", "product statements")
        print(f"{room:<22}", *(f"{counter[column]:>10,}" for column in columns))
    print("\n".join(f"{name:<22} {count:>10,}" for name, count in kinds.items()))


if __name__ == "__main__":
    main()
