"""The choice between the native part, if it exists, fits and is wanted, and the fallback."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hal_core.errors import InvalidValue, Unavailable
from hal_cuda import building, native
from hal_cuda.native import VARIABLE


@pytest.fixture
def part(monkeypatch):
    """Replace the native part by ``part(module)``; None: it was not built."""

    def put(module):
        monkeypatch.setattr(native, "find_spec", lambda name: module)
        monkeypatch.setattr(native, "import_module", lambda name: module)
        monkeypatch.delenv(VARIABLE, raising=False)

    return put


SAME = {"SOURCES": building.sources_digest(), "LAYOUT": native.layout(), "int32s": lambda array, *_: array.tobytes()}
GOOD = SimpleNamespace(**SAME)
OLD = SimpleNamespace(**SAME | {"LAYOUT": native.layout().replace("table 5", "table 6")})
OTHER = SimpleNamespace(**SAME | {"SOURCES": "0" * 16})
BLIND = SimpleNamespace(**SAME | {"int32s": lambda array, *_: array[::-1].tobytes()})


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "the native part was not built"),
        (OLD, "built for another version of paddle-hal-core"),
        (OTHER, "built for another version of paddle-hal-cuda"),
        (BLIND, "lays out its arrays in another way"),
    ],
)
def test_a_missing_or_foreign_native_part_is_not_used(part, monkeypatch, module, why):
    part(module)
    found, line = native.find()
    assert found is None
    assert why in line
    assert "python -m hal_cuda.building" in line
    assert "\n" not in line
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(Unavailable, match=why):
        native.find()


OTHER_CORE = """
import hal_cuda.building as building, hal_cuda.native as native, pathlib, sys
folder = pathlib.Path(sys.argv[1])
digest = building.sources_digest()
building.FOLDER = folder
building.FLAGS = ("-O0", *building.FLAGS[1:])  # it is loaded, and nothing of it runs
building.sources_digest = native.sources_digest = lambda: digest  # as if the core alone had changed since
made = building.build(folder)
import importlib.util
spec = importlib.util.spec_from_file_location("hal_cuda._native", made)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
native.find_spec, native.import_module = lambda name: spec, lambda name: module
module.Driver = module.HostTable = module.gather = None  # it is never called
print(*native.find())
"""


def test_a_native_part_of_another_core_is_refused_with_the_cure(tmp_path):
    """A real one, with one more column in its table: loaded, compared, and not used."""
    for file in building.FOLDER.glob("*.[ch]"):
        (tmp_path / file.name).write_text(file.read_text().replace("#define TABLE 8 ", "#define TABLE 9 "))
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", OTHER_CORE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "NotBuilt" in done.stderr and "the compiler failed" not in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None the native part was built for another version of paddle-hal-core (install a C")
    done = subprocess.run(
        command, env=environment | {VARIABLE: "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Unavailable" in done.stderr
    assert "python -m hal_cuda.building" in done.stderr


def test_the_variable_chooses(part, monkeypatch):
    part(GOOD)
    assert native.find() == (GOOD, "")
    monkeypatch.setenv(VARIABLE, "1")
    assert native.find() == (GOOD, "")
    monkeypatch.setenv(VARIABLE, "0")
    assert native.find() == (None, f"{VARIABLE}=0")
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(InvalidValue, match=f"{VARIABLE}=yes"):
        native.find()


def test_an_open_device_names_its_path(opened):
    bound = opened()
    assert bound.note.startswith("path: native; ")
    assert "NCCL" in bound.note
    assert not bound.capabilities.fallbacks


def test_a_driver_without_a_function_is_refused_by_its_name():
    import ctypes

    with pytest.raises(Unavailable, match="cuMemcpyHtoDAsync_v2"):
        native.functions(ctypes.CDLL(None))
