"""Run the tests that use a compiler on a machine without one: they must be skipped, and none may fail.

    python tools/no_compiler.py [PYTEST OPTIONS]

``PATH`` is a folder with links to all programs but compilers, and the cache of builds is empty. Only files that use the
simulator or a build are run, themselves or through a module of the tests; `make test` covers the rest.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|c\+\+|cc|c89|c99|clang|clang\+\+|cpp|nvcc)(-.*)?")
NAMED = ("CC", "CXX", "HALSIM_CACHE", "HAL_CACHE")
"""Variables that name a compiler, or a cache."""
USES = re.compile(r"\bsim\b|hal_sim|[Cc]ompiler|g\+\+")
TESTS = ("tests", "core/tests", "conformance/tests", "plugins/*/tests", "adapters/*/tests", "runners/*/tests")


def imported(path: Path) -> Iterator[Path]:
    """Give the files of the repository that a file of the tests may import from, existing or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if node.level else ROOT
            module = start.joinpath(*(node.module or "").split("."))
            yield module.with_suffix(".py")
            yield from (module / f"{one.name}.py" for one in node.names)


def uses_build(path: Path, seen: set[Path]) -> bool:
    """Return whether a file, or one that it imports, names the simulator or a compiler."""
    if path in seen or not path.exists():
        return False
    seen.add(path)
    return bool(USES.search(path.read_text(encoding="utf-8"))) or any(uses_build(one, seen) for one in imported(path))


def files() -> list[Path]:
    """Return the test files that use a build."""
    every = (path for folder in TESTS for place in ROOT.glob(folder) for path in sorted(place.rglob("test_*.py")))
    return [path for path in every if uses_build(path, set())]


def link_programs(folder: Path) -> None:
    """Link every program of this ``PATH`` except compilers."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if place else ():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)


def main(options: list[str]) -> int:
    """Run the tests; pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="hal-no-compiler-") as name:
        programs, cache = Path(name, "bin"), Path(name, "cache")
        programs.mkdir()
        link_programs(programs)
        kept = {key: value for key, value in os.environ.items() if key not in NAMED}
        settings = {"PATH": str(programs), "XDG_CACHE_HOME": str(cache), "HAL_TEST_SHARE": "0.01"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, files())]
        return subprocess.run(command, cwd=ROOT, env=kept | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
