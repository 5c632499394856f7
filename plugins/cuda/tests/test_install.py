"""Installing the cuda device in three ways, with a compiler and in the three cases where it cannot compile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hal_cuda import building

from tests import share

pytest.importorskip("hatchling", reason="nothing can be installed here: hatchling is not there")

SOURCE = Path(__file__).parents[1]
CASES = {
    "good": None,
    "no compiler": "/nowhere/cc",
    "no headers": f"{' '.join(building.compiler())} -nostdinc",
    "a failing compiler": "false",
}
FIND = """
import site, sys
before = list(sys.path)
site.addsitedir(sys.argv[1])
sys.path[:] = [path for path in sys.path if path not in before] + before
import hal_cuda.native as native
assert native.__file__.startswith(sys.argv[2]), native.__file__
module, why = native.find()
print("native" if module else "fallback", why)
"""


def run(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "HAL_CUDA_NATIVE", "PYTHONPATH")}
    found = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout, found.stderr


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Compile the complete part once, without optimizing, as it is never run; skip the tests if that is impossible
    here."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(building, "FLAGS", ("-O0", *building.FLAGS[1:]))
            building.build(tmp_path_factory.mktemp("compiler"))
    except building.NotBuilt as error:
        if "the compiler failed" in str(error):
            raise
        pytest.skip(f"nothing can be compiled here: {error}")


BUILD = """
import hatchling.build as backend, os, sys
os.chdir(sys.argv[1])
print(getattr(backend, sys.argv[2])(sys.argv[3]), file=open(sys.argv[3] + "/name", "w"))
"""


def built(call, source, folder, **environment):
    """Return the result of a build backend's hook on a source tree, called as pip does, and its output."""
    folder.mkdir()
    out, err = run(sys.executable, "-c", BUILD, str(source), call, str(folder), **environment)
    return folder / (folder / "name").read_text().strip(), out + err


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the sources without build results, as in the source distribution."""
    folder = tmp_path_factory.mktemp("trees")
    shutil.copytree(SOURCE, folder / "tree", ignore=shutil.ignore_patterns("*.so", "__pycache__", "tests", "proof"))
    made, _ = built("build_sdist", folder / "tree", folder / "sdist")
    shutil.unpack_archive(made, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return {"wheel": folder / "tree", "editable": folder / "tree", "sdist": unpacked}


WAYS = [(case, way) for case in CASES for way in ("editable", "wheel", "sdist")]
HERE = {("good", "sdist"), ("no compiler", "wheel"), ("no headers", "editable"), ("a failing compiler", "sdist")}
"""``make test`` runs every case and every way once; ``make conform`` runs the rest."""


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("case", "way"), share.cases(WAYS, HERE.__contains__))
def test_without_a_compile_the_fallback_is_used_with_one_line(way, case, tree, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tree[way], source)
    named = {} if CASES[case] is None else {"CC": CASES[case]}
    wheel, output = built("build_editable" if way == "editable" else "build_wheel", source, tmp_path / "out", **named)
    assert ("cp311-abi3-" in wheel.name) == (case == "good" and way != "editable"), wheel.name
    shutil.unpack_archive(wheel, target, "zip")
    lines = [line for line in output.splitlines() if "the native part of the cuda device was not built" in line]
    assert len(lines) == (case != "good"), output
    found, noise = run(sys.executable, "-c", FIND, str(target), str(tmp_path))
    if case == "good":
        assert (found.split(), noise) == (["native"], "")
        return
    assert found.startswith("fallback the native part was not built (install a C compiler")
    assert "python -m hal_cuda.building" in found
    assert noise == ""


@pytest.mark.conform
@pytest.mark.usefixtures("compiler")
def test_an_earlier_build_does_not_outlive_a_failing_compile(tree, tmp_path):
    """An editable install whose compile fails keeps no native part of older sources."""
    source = tmp_path / "source"
    shutil.copytree(tree["editable"], source)
    built("build_editable", source, tmp_path / "first")
    assert (source / "src/hal_cuda" / building.NAME).exists()
    built("build_editable", source, tmp_path / "second", CC="false")
    assert not (source / "src/hal_cuda" / building.NAME).exists()
