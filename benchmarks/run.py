"""Run every benchmark of this folder but in_turn.py, which needs another tree, each in a process of its own.

python benchmarks/run.py [name …]
"""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent


def installed(name: str) -> str:
    """The version of a distribution, or a dash."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def versions() -> str:
    """Return the date and the versions, in one line."""
    packages = ", ".join(
        f"{name} {installed(name)}" for name in ("paddle-hal", "paddlepaddle", "numpy", "cryptography")
    )
    return f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {packages}"


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; the exit code is that of the first that failed."""
    known = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in ("run", "in_turn")}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    print(versions())
    failed = 0
    for name in names or known:
        print(f"\n== {name}", flush=True)
        failed = failed or subprocess.run([sys.executable, known[name]], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
