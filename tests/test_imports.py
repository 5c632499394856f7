"""Paddle's import in a command: where the process ends with it, no collection walks through what it leaves."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hal.cli import imports, main, signals

from .commands import environment

#: In Paddle's place: it tells whether garbage is collected, and of how many objects no more is.
PADDLE = """
import atexit, gc, sys
print("collects:", gc.isenabled(), file=sys.stderr)
atexit.register(lambda: print("later:", gc.isenabled(), gc.get_freeze_count() > 10_000, file=sys.stderr))
raise ImportError("it is a stand-in")
"""
PROCESS = "from hal.cli import main; main()"
LIBRARY = "import sys; from hal.cli import main; main(sys.argv[1:])"


@pytest.mark.parametrize(
    ("code", "told"),
    [(PROCESS, ["collects: False", "later: True True"]), (LIBRARY, ["collects: True", "later: True False"])],
    ids=["process", "library"],
)
def test_paddle_is_imported_uncollected_where_the_process_ends(tmp_path, code, told):
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle" / "__init__.py").write_text(PADDLE)
    more = environment(tmp_path, PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--prompt", "x"], capture_output=True, text=True, check=False, env=more
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert [line for line in lines if line.startswith(("collects:", "later:"))] == told
    assert any("Paddle, which the model runs on, cannot be imported: it is a stand-in" in line for line in lines)


def test_a_caller_who_collects_nothing_is_left_alone(monkeypatch):
    monkeypatch.setattr(signals, "ends_process", lambda: True)
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("the caller's objects were frozen"))
    monkeypatch.setattr(gc, "enable", lambda: pytest.fail("the caller's collections were turned on"))
    with imports.uncollected():
        pass


def test_a_command_called_by_a_library_does_not_end_its_process():
    with pytest.raises(SystemExit):
        main(["--version", "--nonsense"])
    assert not signals.ends_process()
