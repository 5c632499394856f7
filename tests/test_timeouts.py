"""Durations are fields of the timeouts.py of hal_core, hal and hal_engine, which docs/timeouts.md lists."""

import ast
import contextlib
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hal_core import TIMEOUTS as CORE
from hal_core import CoreTimeouts, InvalidValue
from hal_engine.timeouts import GONE, TIMEOUTS, Timeouts
from hal_engine.transport.places import dial, listen

from hal.timeouts import Timeouts as OfHal

ROOT = Path(__file__).parents[1]
HOMES = (
    ROOT / "hal" / "timeouts.py",
    ROOT / "engine/src/hal_engine/timeouts.py",
    ROOT / "core" / "src" / "hal_core" / "timeouts.py",
)
FOLDERS = [
    ROOT / "hal",
    ROOT / "core" / "src",
    *ROOT.glob("engine/src"),
    *ROOT.glob("plugins/*/src"),
    *ROOT.glob("adapters/*/src"),
    *ROOT.glob("runners/*/src"),
]
SOURCES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if path not in HOMES]
WAITS = ("sleep", "wait", "join", "settimeout", "alarm")
SECONDS = re.compile(r"\bseconds\b", re.IGNORECASE)
NAMES = re.compile(r"(SECONDS|_MS|TIMEOUT|PATIENCE|_DELAY|_PAUSE)\b")
ARGUMENTS = re.compile(r"timeout|patience|seconds|silence|deadline|beat\b|idle|grace|lost_after|delay")


def is_number(node):
    """Return whether a literal is a duration: 0 means no wait."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def constants(text):
    """The lines of constants in seconds: named ones, arguments of waits, and defaults of parameters."""
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else ()
        for place, one in enumerate(body):
            if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
                values = one.value.elts if isinstance(one.value, ast.Tuple) else [one.value]
                about = lines[one.lineno - 1].partition("#")[2]
                if place + 1 < len(body) and isinstance(body[place + 1], ast.Expr):
                    about += ast.unparse(body[place + 1])
                name = lines[one.lineno - 1].partition("=")[0].partition(":")[0]
                named = NAMES.search(name) or (isinstance(node, ast.ClassDef) and ARGUMENTS.search(name))
                if any(map(is_number, values)) and (named or SECONDS.search(about)):
                    yield one.lineno
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [*(node.args[:1] if name in WAITS else ()), *(k.value for k in node.keywords if k.arg == "timeout")]
            if any(map(is_number, given)):
                yield node.lineno
        if isinstance(node, ast.BinOp) and is_number(node.right) and ast.unparse(node.left).endswith("monotonic()"):
            yield node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            values = node.args
            positional = [*values.posonlyargs, *values.args]
            pairs = [*zip(reversed(positional), reversed(values.defaults), strict=False)]
            pairs += zip(values.kwonlyargs, values.kw_defaults, strict=True)
            if any(default is not None and is_number(default) and ARGUMENTS.search(arg.arg) for arg, default in pairs):
                yield node.lineno


def test_no_other_module_has_a_constant_in_seconds():
    found = {str(path.relative_to(ROOT)): [*constants(path.read_text(encoding="utf-8"))] for path in SOURCES}
    # Steps of a proposer that pauses are not seconds.
    assert {
        name: lines for name, lines in found.items() if lines and name != "engine/src/hal_engine/proposers/adaptive.py"
    } == {}


def test_the_page_lists_all():
    page = (ROOT / "docs" / "timeouts.md").read_text(encoding="utf-8")
    assert CoreTimeouts.table() in page, "python -m hal_core.timeouts prints the table"
    assert OfHal.table() in page, "python -m hal.timeouts prints the table"
    assert Timeouts.table() in page, "python -m hal_engine.timeouts prints the table"
    rows = [line for one in (CoreTimeouts, OfHal, Timeouts) for line in one.table().splitlines()[2:]]
    assert len(rows) == len(Timeouts.names())


def test_each_is_used():
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    used = {*re.findall(r"\b(?:TIMEOUTS|limits)\.(\w+)", text)}  # ``limits``: in the signals' modules
    assert [name for name in Timeouts.names() if name not in used] == []


def test_variables_override(monkeypatch):
    assert Timeouts.step.variable == "HAL_RANKS_STEP"
    assert Timeouts.look.variable == "HAL_SECONDS_LOOK"
    monkeypatch.setenv("HAL_SECONDS_LOOK", "0.5")
    assert TIMEOUTS.look == 0.5
    monkeypatch.setenv("HAL_SECONDS_LOOK", "")
    assert TIMEOUTS.look == 0.1


def test_a_field_of_the_core_is_one_for_host_and_core(monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "collective", 7.0)
    assert CORE.collective == 7.0
    monkeypatch.setenv("HAL_RANKS_TIMEOUT", "9")
    assert (CORE.collective, TIMEOUTS.collective) == (9.0, 9.0)


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan"])
def test_a_wrong_one_is_refused_by_name_before_anything_starts(given, monkeypatch, command):
    monkeypatch.setenv("HAL_RANKS_STEP", given)
    with pytest.raises(InvalidValue, match="HAL_RANKS_STEP"):
        _ = TIMEOUTS.step
    done = command("devices")
    assert done.status == 2
    assert f"HAL_RANKS_STEP: '{given}' (give seconds above 0, as 30)" in done.err


def test_a_very_long_one_is_one_that_polls_and_sockets_take(monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_SILENCE", "1e9")
    poller = select.poll()
    with contextlib.closing(listen("tcp://127.0.0.1:*", None, 1)) as door, dial(door.url, None):
        poller.register(door, select.POLLIN)
        assert poller.poll(1000 * TIMEOUTS.silence)
        door.accept().close()


def test_a_variable_of_a_former_timeout_is_named(monkeypatch, caplog):
    assert not {name.lower() for name in GONE} & {*Timeouts.names()}
    monkeypatch.setenv("HAL_SECONDS_BROKEN", "3")
    monkeypatch.setenv("HAL_SECONDS_PEER_SILENCE", "8")
    TIMEOUTS.check()
    assert "HAL_SECONDS_BROKEN limits nothing any more" in caplog.text
    assert "HAL_SECONDS_PEER_SILENCE is HAL_SECONDS_SILENCE now" in caplog.text
    assert {*GONE.values()} <= {"", *Timeouts.names()}


@pytest.mark.parametrize("module", ["hal_engine.timeouts", "hal.timeouts", "hal_core.timeouts"])
def test_a_reader_that_has_gone_is_no_error(module):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", module], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
