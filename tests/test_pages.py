"""The README's first screen, the map and the glossary: they name only existing things, and name all of them."""

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import hal_core
import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "hal_core"
ENGINE = ROOT / "engine/src/hal_engine"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FACES = ("hal", "hal_conformance", *(f"hal_core.{face}" for face in ("devices", "frames", "handover")))
SCREEN = 50
"""Lines of a screen."""


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def first_screen():
    return "\n".join(text("README.md").splitlines()[:SCREEN])


@pytest.mark.parametrize(
    "text",
    [
        "FastDeploy",
        "vLLM",
        "`.venv`",
        "hal conform",
        "pip install ./core",
        "\n    make test\n",
        "(docs/adding-a-device.md)",
        "(docs/support.md)",
    ],
)
def test_the_first_screen_says(text):
    assert text in first_screen()


def test_the_first_command_samples_with_a_seed():
    (command,) = re.findall(r"^    make run ARGS='(.*?)'", first_screen(), re.M)
    assert all(f"{option} " in f"{command} " for option in ("--temperature 0.7", "--top-p 0.9"))
    assert re.search(r"--seed \d+", command)


def test_the_drawing_is_plain_text_that_names_every_part():
    (drawing,) = re.findall(r"^```\n(.*?)^```", first_screen(), re.S | re.M)
    assert drawing.isascii()
    assert max(map(len, drawing.splitlines())) <= 80
    for part in ("worker", "hooks", "policy", "plugins", "kit", "insert_tasks", "save_output"):
        assert part in drawing
    # Boxes of one drawing close: each border has the length and the corners of the rest.
    borders = {line.strip() for line in drawing.splitlines() if line.strip().startswith("+")}
    assert len(borders) == 1


def installed_by(line):
    """The places in the clone that a ``pip install`` line names, and their extras."""
    for word in line.replace("'", "").split():
        if found := re.fullmatch(r"(\.(?:/[\w/-]+)?)(?:\[([\w,]+)\])?", word):
            yield found[1], (found[2] or "").split(",") if found[2] else []


def test_install_lines_name_places_and_extras_that_are_there():
    lines = re.findall(r"`(pip install [^`]*)`", text("README.md"))
    assert len(lines) == 3
    for line in lines:
        named = dict(installed_by(line))
        assert {".", "./core"} <= named.keys()
        for place, extras in named.items():
            project = tomllib.loads((ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(extras) <= project.get("optional-dependencies", {}).keys(), place


def test_ci_checks_each_version_of_python_that_the_readme_names():
    first, last = map(int, re.search(r"Python 3\.(\d+) to 3\.(\d+)", text("README.md")).groups())
    plan = ["make", "--no-print-directory", "-n", "-f", "tools/parts.mk", "ci"]
    listed = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    checked = re.findall(r"tools/pythons\.py 3\.(\d+)'$", listed, re.MULTILINE)
    assert checked == [str(minor) for minor in range(first, last + 1)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_readme_leads_to_every_page():
    readme = text("README.md")
    reached = set(re.findall(r"\(docs/([\w-]+\.md)\)", readme))
    for page in list(reached):
        reached |= set(re.findall(r"\]\(([\w-]+\.md)", text(f"docs/{page}")))
    assert {page.name for page in PAGES[1:]} <= reached


def test_the_architecture_is_a_page_of_eight_steps():
    page = text("docs/architecture.md")
    assert len(page.splitlines()) <= 60
    steps = re.findall(r"^(\d)\. \*\*.*?(?=^\d\. |^$)", page, re.S | re.M)
    assert steps == list("12345678")
    bodies = re.findall(r"^\d\. \*\*.*?(?=^\d\. |^$)", page, re.S | re.M)
    assert all(re.search(r"`[\w/]+\.py`", body) for body in bodies)


def test_the_architecture_names_files_that_are_there():
    named = set(re.findall(r"`([\w*/-]+(?:/|\.py|\.md))`", text("docs/architecture.md")))
    assert len(named) >= 40
    roots = (ROOT, CORE, CORE / "devices", ROOT / "conformance/src/hal_conformance", ROOT / "hal", ENGINE)
    assert [name for name in sorted(named) if not any(list(root.glob(name)) for root in roots)] == []
    # and every folder of the core and of the host is on the map
    folders = [
        path.name for root in (CORE, ROOT / "hal", ENGINE) for path in root.iterdir() if (path / "__init__.py").exists()
    ]
    page = text("docs/architecture.md")
    assert [folder for folder in folders if f"{folder}/`" not in page] == []


def rows():
    """Rows of the glossary: the cells of each, with the headings of its table."""
    heading = []
    for line in text("docs/glossary.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            heading = []
        elif not heading:
            heading = cells
        elif set(line) - set("|-"):
            assert len(cells) == len(heading), line
            yield dict(zip(heading, cells, strict=True))


def names(cell):
    """The names in a cell; of a dotted one its parts."""
    return {part for name in re.findall(r"`([\w.]+)`", cell) for part in name.split(".")}


def test_every_public_name_is_in_the_glossary():
    known = set()
    for row in rows():
        known |= names(row.get("hal", "")) | names(row.get("formerly", ""))
        known |= names(row.get("error", "")) | names(row.get("raised when", ""))
    known |= names(text("docs/glossary.md").partition("## Errors")[2].partition("|")[0])
    not_words = {"DONE", "ENTERING", "FEEDING", "LEAVING", "hookimpl"}  # values and a marker
    assert set(hal_core.__all__) - not_words - known == set()
    aliases = {"Index", "Launch", "Mode", "Part"}  # of other types
    for face in FACES:
        classes = {name for name in importlib.import_module(face).__all__ if re.match("[A-Z][a-z]", name)}
        assert classes - aliases - known == set(), face


def test_each_glossary_line_has_a_meaning_and_no_word_repeats():
    seen = set()
    for row in rows():
        word, meaning = list(row.values())[:2]
        assert word
        assert meaning
        assert word not in seen
        seen.add(word)


def test_no_former_name_is_public_still():
    former = {name for row in rows() for name in names(row.get("formerly", ""))}
    assert len(former) >= 20
    assert former & {*hal_core.__all__} == set()
