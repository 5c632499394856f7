"""Wheels of all distributions, proved in fresh environments without this tree: ``make dist``.

    python tools/dist.py                       # into dist/; Python 3.11, 3.12 and 3.13, newest and lowest dependencies
    python tools/dist.py 3.11 --only lowest

In each environment, in an empty folder: the README's first command, `hal conform cpu --profile quick`, and, with the
newest dependencies, strict mypy on a consumer. "lowest" takes the lowest allowed version of each dependency that has a
wheel, by uv, which `make dist` installs. A Python that this machine has not is named. The exit status is 1 if a part
fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pythons import find_python, run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "core", "conformance", "engine", *("plugins/*", "adapters/*", "runners/*"))
VERSIONS, RESOLUTIONS = ("3.11", "3.12", "3.13"), ("newest", "lowest")
WANTED = ("paddle-hal", "paddle-hal-core", "paddle-hal-conformance", "paddle-hal-engine[cpu,serve]")
"""What a user of the README's first command and of the kit installs."""


def build(into: Path) -> list[Path]:
    """Build the wheel of each folder with a pyproject.toml that names a distribution."""
    shutil.rmtree(into, ignore_errors=True)
    found = [
        folder for pattern in FOLDERS for folder in sorted(ROOT.glob(pattern) if "*" in pattern else [ROOT / pattern])
    ]
    folders = [str(folder) for folder in found if (folder / "pyproject.toml").exists()]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--wheel-dir", str(into), *folders], check=True)
    return sorted(into.glob("*.whl"))


def dependencies(wheels: list[Path]) -> Iterator[Requirement]:
    """Give what the wanted distributions need of others, their wanted extras included."""
    wanted = {canonicalize_name(one.name): one.extras for one in map(Requirement, WANTED)}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = message_from_bytes(archive.read(name))
        if (extras := wanted.get(canonicalize_name(metadata["Name"]))) is None:
            continue
        for one in map(Requirement, metadata.get_all("Requires-Dist", [])):
            needed = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if needed and not one.name.startswith("paddle-hal"):
                one.marker = None
                yield one


def install(python: Path, resolution: str, dist: Path, needs: list[Requirement]) -> None:
    """Install the wanted wheels, and the newest or the lowest allowed of what they need."""
    given = ["-q", "--find-links", str(dist), *WANTED, *map(str, needs)]
    if resolution == "newest":
        subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", *given], check=True)
        return
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    options = ["--resolution", "lowest-direct", "--only-binary", ":all:", "--python", str(python)]
    subprocess.run([uv or "uv", "pip", "install", *options, *given], check=True)


def first_command() -> list[str]:
    """Return the README's first command, as its make runs it."""
    made = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "run"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^    make run ARGS='(--prompt .*)'$", readme, re.MULTILINE)
    line = subprocess.run([*made, f"ARGS={arguments}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.strip().replace(".venv/bin/hal", "hal")]


def prove(version: str, resolution: str, dist: Path, needs: list[Requirement]) -> str:
    """Return what came of one environment, for the table."""
    if (python := find_python(version)) is None:
        return "not found here"
    with tempfile.TemporaryDirectory(prefix="hal-dist-") as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        programs = folder / "env" / "bin"
        install(programs / "python", resolution, dist, needs)
        (line,) = first_command()
        if resolution == "newest":
            shutil.copy(ROOT / "tests" / "consumer.py", folder / "empty")
            subprocess.run([programs / "python", "-m", "pip", "install", "-q", "mypy"], check=True)
            run([str(programs / "mypy"), "--strict", "consumer.py"], folder / "empty")
        for command in (f"{programs}/{line}", f"{programs}/hal conform cpu --profile quick"):
            run(["bash", "-c", command], folder / "empty")
    return "passed"


def main() -> int:
    """Build, and prove each environment; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--only", choices=RESOLUTIONS)
    asked = parser.parse_args()
    dist = ROOT / "dist"
    wheels = build(dist)
    needs, results = [*dependencies(wheels)], dict[tuple[str, str], str]()
    for version in asked.versions or VERSIONS:
        for resolution in [asked.only] if asked.only else RESOLUTIONS:
            try:
                results[version, resolution] = prove(version, resolution, dist, needs)
            except (SystemExit, OSError, subprocess.SubprocessError) as error:
                results[version, resolution] = f"failed: {error}"
    print(f"{len(wheels)} wheels in {dist.relative_to(ROOT)}/")
    for (version, resolution), result in results.items():
        print(f"Python {version}, {resolution} dependencies: {result}")
    return any(result.startswith("failed") for result in results.values())


if __name__ == "__main__":
    raise SystemExit(main())
