"""Building: once, in a cache, without warnings, with an error that names the cure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hal_sim import build

TINY = 'extern "C" int answer() { return 42; }\n'


def test_the_sources_compile_without_warnings(built):
    assert (built.parent / "build.log").read_text() == ""
    assert (build.paddle_device().parent / "build.log").read_text() == ""


def test_no_compiler_is_an_error_with_the_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert build.core_library().is_file(), "what was built before is found without a compiler"
    monkeypatch.setenv("HALSIM_CACHE", str(tmp_path))
    with pytest.raises(build.NoCompiler, match=r"tried g\+\+, c\+\+, clang\+\+.*install g\+\+"):
        build.core_library()


def test_a_refusing_compiler_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("HALSIM_CACHE", str(tmp_path))
    source = tmp_path / "broken.cc"
    source.write_text("int main() { return no_such_name; }\n")
    with pytest.raises(build.BuildFailed, match="no_such_name"):
        build._built("test", "lib.so", [source], [], (), (), "")
    assert [p.suffix for p in tmp_path.iterdir() if p != source] == [".lock"], "nothing half-built stays"


def test_an_unusable_cache_is_an_error_with_the_cure(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HALSIM_CACHE", str(blocked / "cache"))
    with pytest.raises(build.BuildFailed, match="set HALSIM_CACHE"):
        build._built("test", "lib.so", [], [], (), (), "")


def test_a_build_whose_library_was_removed_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HALSIM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cc"
    source.write_text(TINY)
    made = build._built("tiny", "lib.so", [source], [], (), (), "")
    made.unlink()
    assert build._built("tiny", "lib.so", [source], [], (), (), "") == made
    assert made.is_file()


def test_without_a_home_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("HALSIM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~no-such-user").expanduser())
    with pytest.raises(build.BuildFailed, match="set HALSIM_CACHE"):
        build.cache_folder()


def test_parallel_processes_build_once(tmp_path):
    source = tmp_path / "tiny.cc"
    source.write_text(TINY)
    counter = tmp_path / "runs"
    wrapper = tmp_path / "cxx"
    real = build.compiler().path
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo run >> "{counter}"\nexec "{real}" "$@"\n')
    wrapper.chmod(0o755)
    code = (
        "import sys, ctypes; from pathlib import Path; from hal_sim import build\n"
        f"lib = build._built('tiny', 'lib.so', [Path({str(source)!r})], [], (), (), '')\n"
        "assert ctypes.CDLL(str(lib)).answer() == 42\n"
    )
    environment = os.environ | {"HALSIM_CACHE": str(tmp_path / "cache"), "CXX": str(wrapper)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(4)]
    assert [p.wait(60) for p in processes] == [0] * 4
    assert counter.read_text().count("run") == 2, "one compilation and one link"


def test_another_source_is_another_build(monkeypatch, tmp_path):
    monkeypatch.setenv("HALSIM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cc"
    places = []
    for text in (TINY, TINY.replace("42", "43"), TINY):
        source.write_text(text)
        places.append(build._built("tiny", "lib.so", [source], [], (), (), "").parent)
    assert places[0] == places[2] != places[1]


def test_files_stay_small():
    for file in Path(build.NATIVE).iterdir():
        assert len(file.read_text().splitlines()) <= 350, file.name
