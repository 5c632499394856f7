"""Rules of the suite itself: one profile of Hypothesis, the tests left to `make conform`, folders that share ranks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    path for folder in ("tests", "core/tests", "plugins", "runners") for path in sorted((ROOT / folder).rglob("*.py"))
]
KEPT = {  # runs of the kit that stay in `make test`; every further one is marked `conform`
    "test_the_cpu_device_conforms_and_every_guarantee_is_listed",
    "test_the_device_conforms[lazy-some1]",
    "test_the_conformance_kit[cpu-some]",
}


FILES = (
    "conformance/tests/test_kit.py",
    "conformance/tests/test_kit_in_trouble.py",
    "conformance/tests/test_liars.py",
    "plugins/sim/tests/test_device_kit.py",
    "plugins/maca/tests/test_maca.py",
    "plugins/opencl/tests/test_kit.py",
    "plugins/xpu/tests/test_xpu.py",
    "tests/test_adding_a_device.py",
)
COLLECT = """
import json, pytest, sys
class Told:
    def pytest_collection_finish(self, session):
        print("found", json.dumps({item.name: bool(item.get_closest_marker("conform")) for item in session.items}))
sys.exit(pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Told()]))
"""


def test_make_test_has_three_kit_runs_and_make_conform_the_rest():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *FILES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("found ")).removeprefix("found ")
    )
    quick, whole = ({name for name, conform in found.items() if conform is left} for left in (False, True))
    assert quick >= KEPT
    assert {name.partition("[")[0] for name in whole} == {
        "test_an_asynchronous_device_conforms_and_its_latches_are_used",
        "test_the_cpu_device_conforms_with_several_ranks_in_one_pool",
        "test_the_device_conforms",
        "test_the_conformance_kit",
        "test_the_conformance_kit_on_an_opencl_driver",
        "test_the_conformance_kit_under_the_checker",
        "test_the_kits_tests_of_several_ranks",
        "test_a_run_that_requires_asynchrony_is_refused",
        "test_the_main_job_gives_the_tokens_of_the_cpu",
        "test_a_lost_rank_is_an_error_on_the_survivor_in_time",
        "test_a_failure_has_a_shrunk_example_and_a_reproducing_command",
        "test_an_update_that_waits_for_the_device_is_told_once_with_both_cures",
        "test_a_device_that_ends_the_process_leaves_the_name_of_the_test",
        "test_two_ranks_agree_by_one_collective_a_call_without_races",
        "test_all_pass_the_conformance_kit",
        "test_nothing_is_skipped_on_the_asynchronous_one_but_ranks",
        "test_the_kit_passes_under_copies_that_come_late",
        "test_every_liar_is_killed_by_a_test_of_its_guarantee",
        "test_there_are_liars_enough_and_their_stories_are_told",
        "test_a_liar_that_lives_fails_the_command",
        "test_a_liar_that_outlives_quick_meets_default",
        "test_quick_must_kill_most_and_default_all",
        "test_the_table_names_liar_guarantee_profile_and_seconds",
    }
    assert "-m conform" in (ROOT / "tools" / "parts.mk").read_text()


def test_no_file_loads_a_hypothesis_profile_for_the_others():
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("load_profile", "register_profile")
    ]
    assert calls == []


def test_files_that_share_ranks_are_given_to_one_process():
    spec = importlib.util.spec_from_file_location("hal_suite_conftest", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TOGETHER
    for folder in module.TOGETHER:
        assert list((ROOT / folder).glob("test_*.py")), f"{folder} has no tests any more: name where they are"


TWO = """
import os, pathlib
def test_who(): pathlib.Path({seen!r}).open("a").write(str(os.getpid()) + "\\n")
"""


@pytest.mark.conform
def test_the_scheduler_keeps_a_folder_in_one_process(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    together, apart = tmp_path / "core/tests/groups", tmp_path / "tests"
    for folder in (together, apart):
        folder.mkdir(parents=True)
        for name in "abcd":
            text = TWO.format(seen=str(folder / "seen")) + "test_more = test_again = test_who\n"
            (folder / f"test_{folder.name}_{name}.py").write_text(text)
    options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", *options, "tests", "core/tests/groups"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((together / "seen").read_text().split()) == len((apart / "seen").read_text().split()) == 12
    assert len(set((together / "seen").read_text().split())) == 1
    assert len(set((apart / "seen").read_text().split())) == 2


WITHOUT = """
import pytest

@pytest.mark.parametrize("number", range(2))
def test_simulated(number):
    raise RuntimeError("rank 0: sim: no C++ compiler found (tried g++) (install g++, or name one in the variable CXX)")

@pytest.fixture
def device():
    test_simulated(0)

def test_with_a_device(device): ...

def test_other():
    raise RuntimeError("something else")
"""


@pytest.mark.parametrize(("programs", "ended"), [((), "1 failed, 3 skipped"), (("g++",), "3 failed, 1 error")])
def test_what_needs_a_compiler_is_skipped_and_counted_without_one(tmp_path, programs, ended):
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "test_made.py").write_text(WITHOUT)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_made.py")]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTEST_XDIST_WORKER")}
    done = subprocess.run(
        command, cwd=tmp_path, env=kept | {"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert f"\n{ended} in " in done.stdout, done.stdout + done.stderr
    line = "3 skipped: sim: no C++ compiler found (tried g++) (install g++, or name one in the variable CXX)\n"
    assert (line in done.stdout) is (not programs)


def test_the_part_without_a_compiler_runs_every_file_that_uses_a_build():
    spec = importlib.util.spec_from_file_location("hal_no_compiler", ROOT / "tools" / "no_compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {str(path.relative_to(ROOT)) for path in module.files()}
    assert "adapters/fastdeploy/tests/test_insertion.py" in found
    assert "tests/overlap/test_waits.py" in found, "its device is opened by another file of its folder"
    assert "tests/test_help.py" not in found
