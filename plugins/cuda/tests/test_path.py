"""Which path is used: the native part that is there, fits and is wanted, or Python's."""

from __future__ import annotations

import logging
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
    """``part(module)``: what is found as the native part; None: it was not built."""

    def put(module):
        monkeypatch.setattr(native, "find_spec", lambda name: module)
        monkeypatch.setattr(native, "import_module", lambda name: module)
        monkeypatch.delenv(VARIABLE, raising=False)
        native._tell.cache_clear()

    return put


GOOD = SimpleNamespace(SOURCES=building.sources_digest(), LAYOUT=native.layout())
OLD = SimpleNamespace(SOURCES=building.sources_digest(), LAYOUT=native.layout().replace("table 5", "table 6"))
OTHER = SimpleNamespace(SOURCES="0" * 16, LAYOUT=native.layout())


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "the native part was not built"),
        (OLD, "built for another version of paddle-hal-core"),
        (OTHER, "built for another version of paddle-hal-cuda"),
    ],
)
def test_what_is_missing_or_was_built_for_another_version_is_not_used(part, monkeypatch, caplog, module, why):
    part(module)
    with caplog.at_level(logging.WARNING):
        assert [native.find()[0] for _ in range(3)] == [None] * 3
    (line,) = [record.getMessage() for record in caplog.records if "Python path" in record.getMessage()]
    assert why in line
    assert "python -m hal_cuda.building" in line
    assert "\n" not in line
    assert why in native.find()[1], "hal devices --open says so"
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
module.Driver = module.Book = module.gather = None  # it is never called
print(*native.find())
"""


def test_a_native_part_that_was_built_for_another_core_is_refused_with_the_cure(tmp_path):
    """A real one, of a table with one more column: loaded, looked at, and not used."""
    for file in building.FOLDER.glob("*.[ch]"):
        (tmp_path / file.name).write_text(file.read_text().replace("#define TABLE 8 ", "#define TABLE 9 "))
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", OTHER_CORE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "NotBuilt" in done.stderr and "the compiler failed" not in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "None  (the native part was built for another version of paddle-hal-core; install a C"
    )
    assert "python -m hal_cuda.building" in done.stderr, "one line says so"
    done = subprocess.run(
        command, env=environment | {VARIABLE: "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Unavailable" in done.stderr
    assert "python -m hal_cuda.building" in done.stderr


def test_the_variable_chooses(part, monkeypatch, caplog):
    part(GOOD)
    assert native.find() == (GOOD, "")
    monkeypatch.setenv(VARIABLE, "1")
    assert native.find() == (GOOD, "")
    monkeypatch.setenv(VARIABLE, "0")
    assert native.find()[0] is None
    assert not caplog.records, "it was asked for"
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(InvalidValue, match=f"{VARIABLE}=yes"):
        native.find()


def test_an_open_device_says_which_path_it_takes(opened):
    bound = opened()
    assert bound.note.startswith(f"path: {'native' if bound.device.driver.native else 'Python'}; ")
    assert "NCCL" in bound.note


def test_a_driver_without_a_function_is_refused_by_its_name():
    import ctypes

    with pytest.raises(Unavailable, match="cuMemcpyHtoDAsync_v2"):
        native.functions(ctypes.CDLL(None))
