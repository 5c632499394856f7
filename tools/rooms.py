"""Check the rooms of the code: no circles, few files beside the folders, and others come in by the front doors alone.

    python tools/rooms.py            what is wrong, a line each; the status is 1 if anything is

Every import counts, those for type checkers too. Between the files and folders that lie beside each other no circle may
run, at any depth. Outside ``hal_core``, product code and examples import its five faces and nothing else of it.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "hal_core": "core/src/hal_core",
    "hal_conformance": "conformance/src/hal_conformance",
    "hal": "hal",
    "hal_cuda": "plugins/cuda/src/hal_cuda",
    "hal_fastdeploy": "plugins/fastdeploy/src/hal_fastdeploy",
    "hal_maca": "plugins/maca/src/hal_maca",
    "hal_opencl": "plugins/opencl/src/hal_opencl",
    "hal_sim": "plugins/sim/src/hal_sim",
    "hal_xpu": "plugins/xpu/src/hal_xpu",
}
FACES = ("hal_core", "hal_core.devices", "hal_core.frames", "hal_core.handover", "hal_conformance")
"""What others import. A face only hands names on, so its own imports are no part of any circle."""
GUESTS = ("hal", "plugins/*/src", "runners/*/src", "examples")
MOST_FILES = 8
"""Files beside the folders of ``hal_core``."""

Graph = dict[str, set[str]]


def modules(package: str, folder: Path) -> dict[str, Path]:
    """The modules of a package by dotted name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, file: Path, known: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The modules of ``known`` that a module imports, anywhere in it, with the line."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        yield from ((target, node.lineno) for target in targets if target in known)


def graph(found: Mapping[str, Path]) -> Graph:
    """Who imports whom; the faces' own imports are left out."""
    return {
        name: set() if name in FACES else {target for target, _ in imports(name, file, found)}
        for name, file in found.items()
    }


def siblings(edges: Graph) -> dict[str, Graph]:
    """For each folder, who among its files and folders imports whom."""
    levels: dict[str, Graph] = defaultdict(lambda: defaultdict(set))
    for source, targets in edges.items():
        for target in targets:
            mine, theirs = source.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if depth is None:
                continue  # a package and what lies in it
            levels[".".join(mine[:depth])][".".join(mine[: depth + 1])].add(".".join(theirs[: depth + 1]))
    return levels


def circles(edges: Graph) -> list[list[str]]:
    """The shortest circle through each node that is on one, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in edges:
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            if start in edges.get(path[-1], ()):
                found.setdefault(frozenset(path), [*path, start])
                break
            for following in sorted(edges.get(path[-1], set()) - seen):
                seen.add(following)
                paths.append([*path, following])
    return list(found.values())


def wrong_circles() -> Iterator[str]:
    """Circles within each package."""
    for package, folder in PACKAGES.items():
        for level in siblings(graph(modules(package, ROOT / folder))).values():
            for circle in circles(level):
                yield f"circle: {' -> '.join(circle)}"


def wrong_size() -> Iterator[str]:
    """Too many files beside the folders of the core."""
    files = sorted(file.name for file in (ROOT / PACKAGES["hal_core"]).glob("*.py"))
    if len(files) > MOST_FILES:
        yield f"{len(files)} files beside the folders of hal_core, at most {MOST_FILES}: {', '.join(files)}"


def wrong_doors() -> Iterator[str]:
    """Imports of the core by others that are not of a face."""
    core = modules("hal_core", ROOT / PACKAGES["hal_core"])
    for guests in GUESTS:
        for folder in sorted(ROOT.glob(guests)):
            for file in sorted(folder.rglob("*.py")):
                for target, line in imports(file.stem, file, core):
                    if target not in FACES:
                        yield f"{file.relative_to(ROOT)}:{line} imports {target}, which is no face of hal_core"


def main() -> int:
    """Print what is wrong; the exit status."""
    wrong = [*wrong_circles(), *wrong_size(), *wrong_doors()]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
