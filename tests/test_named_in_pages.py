"""The pages name only files, commands, options and variables that exist."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from hal.cli import main
from hal.cli.tree import COMMANDS

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
READMES = [*ROOT.glob("plugins/*/README.md"), *ROOT.glob("adapters/*/README.md"), *ROOT.glob("runners/*/README.md")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(READMES)]
SOURCES = (
    "hal",
    "engine",
    "core",
    "conformance",
    "plugins",
    "adapters",
    "runners",
    "examples",
    "tests",
    "tools",
    "benchmarks",
    ".ci",
)
KINDS = (".py", ".md", ".c", ".cc", ".h", ".cu", ".toml")
PATH = re.compile(r"(?<![\w./-])(?!fastdeploy/)((?:[\w-]+/)+[\w-]+\.(?:py|md|cc|cu|c|h|toml))\b")
"""A file in a folder; fastdeploy/ is another project's."""
OTHERS = {"--pdb", "--devices"}
"""Options of pytest and of Paddle's launcher."""


@pytest.fixture(scope="module")
def files():
    """The files of the tree, by their path, and the text of those that are code."""
    folders = [path for name in (*SOURCES, "docs") for path in (ROOT / name).rglob("*")]
    paths = [path for path in folders if path.suffix in KINDS and "node_modules" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path for path in paths}


@pytest.fixture(scope="module")
def words(files):
    """What the code has of variables and options: ``HAL_NAME``, ``--option``, and typer's parameters as options."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in files.values() if path.suffix not in (".md", ".toml"))
    fields = re.findall(r"^    (\w+): Annotated\[", code, re.M)
    typed = {f"--{name}".replace("_", "-") for name in fields} | {f"HAL_SERVE_{name.upper()}" for name in fields}
    return typed | {*re.findall(r"\bHAL_[A-Z_]*[A-Z]\b", code)} | {*re.findall(r"\"(--[a-z][\w-]*)", code)}


@pytest.fixture(scope="module")
def offered():
    """The options in the help of each command."""
    found = {}
    for command in set(COMMANDS) - {"conform"}:
        help_page = io.StringIO()
        with contextlib.redirect_stdout(help_page), pytest.raises(SystemExit):
            main([command, "--help-all" if command == "run" else "--help"])
        found[command] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_page.getvalue()))
    return found


def missing(text, files):
    """The paths in a text that no file of the tree ends with."""
    tree = "".join(f"/{path}\n" for path in files)
    return sorted(name for name in {*PATH.findall(text)} if f"/{name}\n" not in tree)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page, files):
    assert missing(page.read_text(encoding="utf-8"), files) == []


def test_a_script_that_is_gone_has_its_commit_on_the_evidence_page(files):
    table = (EVIDENCE / "README.md").read_text(encoding="utf-8").partition("| page | topic |")[0]
    listed = {Path(name).name for name in re.findall(r"[\w/]+\.py", table)} | set(re.findall(r"`(\w+)`", table))
    gone = {
        f"{page.name}: {name}"
        for page in sorted(EVIDENCE.glob("*.md"))
        for name in missing(page.read_text(encoding="utf-8"), files)
        if not {Path(name).name, Path(name).stem} & listed
    }
    assert gone == set()


@pytest.mark.parametrize("page", [*PAGES, *sorted(EVIDENCE.glob("*.md"))], ids=lambda page: page.stem)
def test_options_and_variables_of_hal_exist(page, words, offered):
    text = page.read_text(encoding="utf-8")
    for command, rest in re.findall(rf"\bhal ({'|'.join(offered)}) ([^`#|\n]*)", text):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) - offered[command] == set(), f"hal {command} {rest}"
    assert set(re.findall(r"`hal ([a-z][a-z-]*)`", text)) <= {*COMMANDS}
    variables = set(re.findall(r"\bHAL_[A-Z_]*[A-Z]\b(?!_?\*)", text))
    assert {name for name in variables - words if not name.startswith("HAL_SECONDS_")} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_options_are_of_some_command(page, words):
    assert {*re.findall(r"`(--[a-z][\w-]+)", page.read_text(encoding="utf-8"))} - OTHERS - words == set()


def test_named_modules_can_be_run():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = set(re.findall(r"python -m ((?:hal|benchmarks|tests)[\w.]*)", text))
    assert len(modules) >= 5
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
