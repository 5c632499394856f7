"""The first hour of a user on one version of Python: what README.md has for it, from a fresh install of this checkout.

    python tools/pythons.py 3.13

Makes `.venv-3.13` if it is missing, installs into it as the README says, and runs there `hal run`, `hal devices`,
`hal doctor`, `hal serve` with one request, `hal conform cpu --only G8`, and the README's Python. With `--tests` it runs
`make test` instead, in a clone below `build`. The exit status is 1 if one of them fails, and 77 if this machine has no
such Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL = (
    "-m",
    "pip",
    "install",
    "-q",
    "--disable-pip-version-check",
    "./core",
    "./conformance",
    ".[serve,cpu]",  # before the engine, which needs it: pip 23 reads from left to right
    "./engine",
)
COMMANDS = (
    ("run", "--help"),
    ("run", "def main(", "--max-tokens", "8"),
    ("devices",),
    ("doctor",),
    ("conform", "cpu", "--only", "G8"),
)
LIMIT = 300.0
"""Seconds for each of them; the longest takes seven on a quiet machine."""


def candidates(version: str) -> Iterator[Path]:
    """Give what may be the interpreter: those on ``PATH``, and those installed beside this one (pyenv, uv, asdf)."""
    name = f"python{version}"
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if found := shutil.which(name, path=folder):
            yield Path(found)
    yield from sorted(Path(sys.base_prefix).parent.glob(f"*/bin/{name}"), reverse=True)


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version that runs: a shim of pyenv's need not."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in candidates(version):
        done = subprocess.run([path, "-I", "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def installed(version: str, python: Path) -> Path:
    """Return the ``bin`` folder of the version's virtual environment, with this checkout installed."""
    folder = ROOT / f".venv-{version}"
    own = folder / "bin" / "python"
    if not own.exists():  # also a link to an interpreter that was removed
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([own, *INSTALL], cwd=ROOT, check=True)
    return own.parent


def run(command: list[str], folder: Path) -> None:
    """Run a command that must succeed, and print no traceback."""
    print("$", *command, flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode or "Traceback" in done.stdout:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}")


def serve(hal: str, folder: Path) -> None:
    """Start a server, send it one request, and stop it."""
    command = [hal, "serve", "--device", "cpu", "--port", "0"]
    print("$", *command, flush=True)
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+:\d+", line)
            if found is None:
                raise SystemExit(f"hal serve began with {line!r}")
            wait_until_loaded(f"{found[0]}/health", process)
            body = json.dumps({"prompt": "def main(", "max_tokens": 8}).encode()
            with urllib.request.urlopen(f"{found[0]}/v1/completions", body, timeout=LIMIT) as answer:
                print(answer.read().decode(), flush=True)
        finally:
            process.send_signal(signal.SIGTERM)
        rest, status = process.stderr.read(), process.wait(LIMIT)
    if status != 128 + signal.SIGTERM or "Traceback" in rest:
        raise SystemExit(f"hal serve ended with {status}: {rest}")


def wait_until_loaded(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until the server's engine takes requests."""
    end = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=LIMIT):
            return
        time.sleep(0.1)
    raise SystemExit("hal serve has not loaded its model")


def run_tests(version: str, python: Path) -> int:
    """Run `make test` in a clone that has an environment of this version; return the exit status."""
    clone = ROOT / "build" / f"python-{version}"
    if clone.exists():
        shutil.rmtree(clone)
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    return subprocess.run(["make", "test", f"PYTHON={python}"], cwd=clone, check=False).returncode


def main(version: str, tests: str = "") -> int:
    """Check one version; the exit status."""
    python = find_python(version)
    if python is None:
        print(f"Python {version} was not found, on PATH or beside {sys.base_prefix}")
        return 77
    if tests == "--tests":
        return run_tests(version, python)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    with tempfile.TemporaryDirectory(
        prefix="hal-first-hour-"
    ) as name:  # no checkout: its own packages are not imported
        folder, programs = Path(name), installed(version, python)
        hal = str(programs / "hal")
        for command in COMMANDS:
            run([hal, *command], folder)
        serve(hal, folder)
        for example in examples:
            run([str(programs / "python"), "-c", example], folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
