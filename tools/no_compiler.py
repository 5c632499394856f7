"""Run the tests that use a compiler on a machine without one: they must be skipped, and none may fail.

    python tools/no_compiler.py [PYTEST OPTIONS]

``PATH`` is a folder with links to all programs but compilers, and earlier builds are out of reach. Only files that use
the simulator or a build are run; `make test` covers the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|c\+\+|cc|c89|c99|clang|clang\+\+|cpp|nvcc)(-.*)?")
FILES = (
    *("plugins/sim", "plugins/cuda", "plugins/maca", "plugins/paddle", "plugins/xpu", "tests/overlap", "tests/matrix"),
    *("tests/proposers/test_whole.py", "tests/test_run_speculation.py", "tests/test_adding_a_device.py"),
    *("conformance/tests/test_paddle_hazards.py", "tests/test_run_answers.py", "tests/split/test_run.py"),
)


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
        kept = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
        told = {"PATH": str(programs), "HALSIM_CACHE": str(cache), "HAL_TEST_SHARE": "0.01"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *FILES]
        return subprocess.run(command, cwd=ROOT, env=kept | told, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
