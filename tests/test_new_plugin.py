"""``hal new-plugin``: a package of each kind is made, found, finished in a few lines, and conforms."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hal_conformance import scaffold
from hal_core import InvalidValue

from hal.cli import main

from .finished_plugins import MOST, RUNTIME, WRITTEN, finish
from .vendors_environment import hal, install, make, run

KINDS = scaffold.KINDS
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fresh environment with an unfinished package of each kind, installed by pip. Offline."""
    folder = tmp_path_factory.mktemp("new")
    shutil.copy(RUNTIME, make(folder) / "memory_runtime.py")
    for kind in KINDS:
        scaffold.make(f"my_{kind}", kind, folder / kind)
    install(folder, *[folder / kind for kind in KINDS])
    return folder


@pytest.fixture(scope="module")
def finished(made):
    """The same packages with the vendor's lines; return their number, by kind."""
    (libraries,) = (made / "env").glob("lib/python*/site-packages")
    for kind in KINDS:
        finish(kind, made / kind / f"src/hal_my_{kind}")
    return {kind: finish(kind, libraries / f"hal_my_{kind}") for kind in KINDS}


def test_unfinished_packages_are_found_and_say_what_to_write(made):
    rows = {row["name"]: row for row in json.loads(hal(made, "devices", "--json").stdout)["devices"]}
    for kind in ("async", "sync"):
        row = rows[f"my_{kind}"]
        assert (row["status"], row["reason"]) == ("unavailable", "its probe is not written yet")
        assert row["cure"] == f"write probe() in src/hal_my_{kind}/__init__.py"
    assert rows["my_paddle"]["status"] == "unavailable"
    assert "no my_paddle" in rows["my_paddle"]["reason"]


@pytest.mark.conform
def test_finished_packages_are_found_and_their_primitives_pass(made, finished):
    assert all(written <= MOST for written in finished.values()), finished
    rows = {row["name"]: row for row in json.loads(hal(made, "devices", "--json").stdout)["devices"]}
    assert [rows[f"my_{kind}"]["status"] for kind in ("async", "sync")] == ["available"] * 2
    done = hal(made, "conform", "my_async", "--only", "G4", "--examples", "1")
    assert done.returncode == 0, done.stdout + done.stderr


VERDICTS = {
    "async": "conforms as far as checked",
    "sync": "conforms, but for G10\n",  # nothing below the hooks counts
    "paddle": "conforms, but for G26\n",  # Paddle's faults cannot be feigned
    "torch": "conforms",
}


@pytest.mark.conform
@pytest.mark.parametrize("kind", KINDS)
def test_finished_packages_conform(made, finished, kind):
    more, drawn = {}, []
    if kind == "paddle":  # Paddle's own calls on a simulated chip are slow
        from hal_sim.build import NoCompiler, paddle_device

        try:
            paddle_device()
        except NoCompiler as error:
            pytest.skip(str(error))
        more, drawn = {"HAL_MY_PADDLE_PLACE": "sim", "HALSIM_MODE": "2"}, ["--examples", "1"]
    if kind == "torch":
        pytest.importorskip("torch")
        more = {"HAL_MY_TORCH_PLACE": "queue"}
    done = hal(made, "conform", f"my_{kind}", "--profile", "quick", *drawn, **more)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f": {VERDICTS[kind]}" in done.stdout


@pytest.mark.conform
def test_a_finished_package_passes_its_own_tests_and_builds(made, finished):
    done = run(made, "-m", "pytest", "-q", "-p", "no:cacheprovider", "async/tests", "-W", "ignore")
    assert done.returncode == 0, done.stdout[-4000:]
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    assert run(made, *build, "--wheel-dir", "dist", "./async").returncode == 0
    (wheel,) = (made / "dist").iterdir()
    assert wheel.name == "hal_my_async-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left_and_the_code_is_formatted(tmp_path, kind):
    made = scaffold.make("my_chip", kind, tmp_path / "new")
    assert "src/hal_my_chip/__init__.py" in made
    assert ".github/workflows/test.yml" in made
    text = "".join((tmp_path / "new" / path).read_text(encoding="utf-8") for path in made)
    assert "MyChipPlugin" in text
    assert [line for line in text.splitlines() if "$" in line and "${{" not in line] == []
    for page, section in re.findall(r'(docs/[\w-]+\.md), "([^"]+)"', text):
        assert f"\n## {section}\n" in (ROOT / page).read_text(encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["format", "--check"], ["check", "--select=E,F,W,UP,B,SIM"]):
        command = [*ruff, *check, "--line-length=120", "--isolated", "--no-cache", str(tmp_path)]
        assert subprocess.run(command, check=False).returncode == 0


def test_an_empty_folder_is_filled(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    main(["new-plugin", "mychip", "--into", "."])
    out = capsys.readouterr().out
    assert out.startswith("made in .:\n  .github/workflows/test.yml\n")
    assert (tmp_path / "mine" / "pyproject.toml").is_file()


@pytest.mark.parametrize("into", ["my chip", "mychip"])
def test_the_printed_command_is_one_for_a_shell(tmp_path, monkeypatch, capsys, into):
    monkeypatch.chdir(tmp_path)
    main(["new-plugin", "mychip", "--into", into])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("next: ")]
    assert shlex.split(line.removeprefix("next: ")) == ["pip", "install", "-e", into]


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_what_fails(tmp_path, monkeypatch, there):
    """The disk is full at the last file."""
    folder = tmp_path / "new"
    if there:
        folder.mkdir()
    files = scaffold.render("mychip", "async")
    monkeypatch.setattr(scaffold, "render", lambda *_: files | {"zz/last\0": "a name that no file can have"})
    with pytest.raises(ValueError, match="null"):
        scaffold.make("mychip", "async", folder)
    assert folder.exists() == there
    assert [*tmp_path.rglob("*")] == ([folder] if there else [])


def test_files_that_somebody_else_made_meanwhile_remain(tmp_path, monkeypatch):
    """The folder was empty when it was looked at."""
    theirs = [tmp_path / "new" / name for name in ("src/work.py", "pyproject.toml")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    monkeypatch.setattr(scaffold, "check_folder", lambda folder: None)
    with pytest.raises(InvalidValue, match=r"pyproject\.toml was made meanwhile \(name a new or empty folder"):
        scaffold.make("mychip", "async", tmp_path / "new")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(theirs)
    assert [path.read_text() for path in theirs] == ["theirs"] * 2


def test_every_kind_has_what_a_test_finishes():
    assert set(WRITTEN) == set(KINDS)
    templates = Path(scaffold.__file__).with_name("templates")
    assert {path.name for path in templates.iterdir()} == {"common", scaffold.RUNNER, *KINDS}
    with pytest.raises(InvalidValue, match="no kind of device"):
        scaffold.make("mychip", "gpu", Path("nowhere"))
