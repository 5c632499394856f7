"""A missing package is one line with a cure, and a cure that works: no index has hal's own packages."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import share

from .commands import environment, left_in

ROOT = Path(__file__).parents[1]
#: hal in an interpreter in which some modules cannot be found.
HIDDEN = """
    import sys
    hidden = set(sys.argv.pop(1).split(","))

    class Hiding:
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] in hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hiding())
    from hal.cli import main
    main()
"""
RUN = ("run", "--prompt", "x", "--temperature=0", "--max-tokens", "2")
SENT = (*RUN, "--sink", "ipc:///nowhere/x")


def without(folder, hidden, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(HIDDEN), hidden, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment(folder), cwd=folder
    )
    assert left_in(folder) == []
    return done


MISSING = [
    ("paddle", RUN, "setuptools, or a build of Paddle for your accelerator; --runner torch needs none"),
    ("hal_core", RUN, "it comes with hal: pip install ./core in hal's checkout"),
    ("hal_core", ("devices",), "it comes with hal: pip install ./core in hal's checkout"),
    ("hal_core", ("tail", "ipc:///nowhere/x"), "it comes with hal: pip install ./core in hal's checkout"),
    ("hal_core", ("conform", "cpu"), "it comes with hal: pip install ./core in hal's checkout"),
    ("hal_core", ("--version",), "it comes with hal: pip install ./core in hal's checkout"),
    ("ray", (*RUN, "--tp", "2", "--launcher", "ray"), "pip install 'ray>=2.40'"),
    ("typer", ("--version",), "pip install 'typer>="),
    ("tokenizers", RUN, "pip install 'tokenizers>="),
    ("cryptography", ("tail", "tcp://127.0.0.1:*", "--key", "key"), "pip install 'cryptography>="),
    ("msgspec", ("tail", "ipc:///nowhere/x"), "pip install 'msgspec>="),
    ("rich", ("devices",), "pip install 'rich>="),
    ("packaging", ("devices",), "pip install 'packaging>="),
    ("hal_conformance", ("conform", "cpu"), "it comes with hal: pip install ./conformance in hal's checkout"),
    ("pytest", ("conform", "cpu"), "pip install 'pytest>="),
    ("hypothesis", ("conform", "cpu"), "pip install 'hypothesis>="),
]
HERE = ("hal_conformance", "ray", "typer", "packaging", "pytest", "hypothesis")
"""In ``make test``, with the first of hal_core, and cryptography; the remaining ones in ``make conform``."""


@pytest.mark.parametrize(
    ("hidden", "arguments", "cure"),
    share.cases(
        MISSING,
        lambda one: (
            one[0] in HERE
            or one[:2]
            in (("paddle", RUN), ("hal_core", RUN), ("cryptography", ("tail", "tcp://127.0.0.1:*", "--key", "key")))
        ),
    ),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_package_is_one_line_with_its_cure(tmp_path, hidden, arguments, cure):
    done = without(tmp_path, hidden, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hal: error: the Python package {hidden!r} is not installed (")
    assert cure in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_does_not_need_the_package_works_without_it(tmp_path):
    assert without(tmp_path, "paddle,tokenizers", "tail", f"ipc://{tmp_path}/s", "--timeout", "0.1").returncode == 0
    assert without(tmp_path, "cryptography,paddle,pydantic", "devices").returncode == 0


@pytest.mark.parametrize("name", ["generate", "devices", "AsyncEngine"])
def test_a_python_without_hal_says_so_in_a_clone(name):
    program = f"import sys; sys.path.append({str(ROOT)!r}); import hal; hal.{name}"
    command = [sys.executable, "-I", "-S", "-c", program]  # -S: without installed packages
    err = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stderr
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1].startswith("ImportError: hal is not installed in this Python: use the environment that")


def test_a_paddle_that_does_not_import_is_one_line(tmp_path):
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle" / "__init__.py").write_text("raise ImportError('libgomp.so.1: cannot open\\nshared object')\n")
    command = [sys.executable, "-c", "from hal.cli import main; main()", *RUN]
    more = environment(tmp_path, PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=more)
    assert (done.returncode, done.stdout) == (2, "")
    why = "Paddle, which the model runs on, cannot be imported: libgomp.so.1: cannot open shared object (reinstall it"
    assert done.stderr.startswith(f"hal: error: {why}")
    assert done.stderr.count("\n") == 1


def sources():
    folders = [ROOT / name for name in ("hal", "engine/src", "core/src", "conformance", "docs")]
    folders += [*(ROOT / "plugins").glob("*/src"), *(ROOT / "adapters").glob("*/src")]
    files = [path for folder in folders for path in [*folder.rglob("*.py"), *folder.glob("*.md")]]
    return [*files, *ROOT.glob("*.md"), *(ROOT / "plugins").glob("*/README.md")]


def test_no_hint_names_a_package_that_no_index_has():
    """Hints that are written out; those made from metadata are tested above."""
    stated = {}
    for folder in (".", "engine", "core", "conformance", "adapters/fastdeploy", "plugins/paddle"):
        table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
        for line in [line for lines in lists for line in lines]:
            stated[Requirement(line).name] = Requirement(line).specifier
    seen = 0
    for path in sources():
        for hint in re.findall(r"pip install +([^`#\n]*)", path.read_text(encoding="utf-8")):
            for word in re.findall(r"^'[^']+'|(?<= )'[^']+'|^[\w./\[\]-]+", hint):
                text = word.strip("'")
                if text.startswith(("{", ".", "-")) or "/" in text:  # from a folder, or made from metadata
                    continue
                wanted = Requirement(text)
                seen += 1
                assert wanted.name in stated, f"{path}: {hint}"
                assert wanted.specifier == stated[wanted.name], f"{path}: {hint}"
    assert seen >= 5
