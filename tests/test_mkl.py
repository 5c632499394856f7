"""MKL's kernels on an AMD CPU: only the command chooses them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hal_core import Unavailable
from hal_engine import mkl
from hal_engine.distributed.launch import LocalLaunch

COMMAND = """
import os, sys
from hal_engine import mkl
from hal.cli import main
mkl.faster_kernels = lambda: "{faster}"
sys.argv = ["hal", "tail", "-h"]
try:
    main()
except SystemExit as end:
    assert not end.code
print(os.environ.get(mkl.VARIABLE))
"""


def after_command(*, faster: str, **variables: str) -> str:
    """The variable in a process of the command."""
    kept = {name: value for name, value in os.environ.items() if name != mkl.VARIABLE}
    code = [sys.executable, "-c", COMMAND.format(faster=faster)]
    return subprocess.check_output(code, text=True, env=kept | variables).splitlines()[-1]


def test_the_command_chooses_the_kernels_where_they_are_faster() -> None:
    assert after_command(faster="5") == "5"
    assert after_command(faster="7") == "7"
    assert after_command(faster="") == "None"


@pytest.mark.parametrize("own", ["0", "7", ""])
def test_a_users_own_value_is_kept(own: str) -> None:
    assert after_command(faster="7", **{mkl.VARIABLE: own}) == own


def test_a_library_users_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mkl.VARIABLE, raising=False)
    monkeypatch.setattr(mkl, "faster_kernels", lambda: "7")
    code = "from hal_engine import mkl; mkl.faster_kernels = lambda: '7'\nfrom hal.cli import main\n"
    code += "try: main(['tail', '-h'])\nexcept SystemExit: pass\n"
    shown = subprocess.check_output([sys.executable, "-c", f"{code}import os; print(os.environ.get('{mkl.VARIABLE}'))"])
    assert shown.splitlines()[-1] == b"None"
    assert mkl.VARIABLE not in os.environ


def test_the_note_tells_the_value_and_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkl, "faster_kernels", lambda: "7")
    assert "AVX-512 on this AMD CPU (MKL_DEBUG_CPU_TYPE=7;" in mkl.kernels_note({mkl.VARIABLE: "7"})
    assert mkl.kernels_note({mkl.VARIABLE: "5"}) == "MKL_DEBUG_CPU_TYPE=5 is kept"
    assert mkl.kernels_note({mkl.VARIABLE: "0"}) == "MKL_DEBUG_CPU_TYPE=0 is kept"
    assert mkl.kernels_note({}) == ""
    monkeypatch.setattr(mkl, "find_spec", lambda package: None)  # without Paddle it has no effect
    assert mkl.kernels_note({mkl.VARIABLE: "0"}) == ""


def test_hal_run_tells_it_with_v(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]) -> None:
    monkeypatch.setenv(mkl.VARIABLE, "0")
    for options, is_shown in ((["-v"], True), ([], False)):
        done = command("run", *options, "--prompts", "/nowhere")
        assert ("MKL_DEBUG_CPU_TYPE=0 is kept" in done.err) is is_shown


def test_ranks_inherit_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: dict[str, str] = {}

    def start(*command: object, env: dict[str, str], **more: object) -> None:
        started.update(env)
        raise OSError("no process here")

    monkeypatch.setenv(mkl.VARIABLE, "5")
    monkeypatch.setattr("hal_engine.distributed.launch.subprocess.Popen", start)
    with pytest.raises(Unavailable):
        LocalLaunch(1).start(f"ipc://{tmp_path}/engine")
    assert started[mkl.VARIABLE] == "5"


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64")
@pytest.mark.parametrize(("cpu", "faster"), [("EPYC", "5"), ("Haswell", ""), ("Opteron_G5", "")])
def test_an_emulator_answers_for_the_cpu_that_it_emulates(cpu: str, faster: str) -> None:
    code = "from hal_engine.mkl import faster_kernels; print(faster_kernels())"
    python = str(Path(sys.executable).absolute())
    done = subprocess.run(["qemu-x86_64", "-cpu", cpu, python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == faster
