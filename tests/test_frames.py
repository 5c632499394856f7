"""How many frames of hal's code lie between a command, a hook and the primitive that does the work."""

import contextlib
import functools
import sys
from pathlib import Path

import pytest
from hal_core.runtime.bound import BoundDevice
from hal_sim.primitives import SimPrimitives

from hal.cli import main

HOOKS = ("broadcast_tokens", "save_output", "async_set_value", "insert_tasks", "update_inputs")
TO_A_HOOK, TO_A_PRIMITIVE = 10, 12


def frames():
    """The caller's functions, innermost first, as pairs of a file and a name; wrappers of this file are left out."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__:
            found.append((Path(path).as_posix(), frame.f_code.co_name))
        elif frame.f_code.co_name.startswith("hook"):
            found.append(("", frame.f_locals["name"]))
        frame = frame.f_back
    return found


@pytest.fixture
def deepest(simulator, monkeypatch):
    """The deepest stacks of a run: from the command to each hook, and from a hook to each primitive."""
    found = {}

    def keep(key, stack):
        found[key] = max(found.get(key, []), stack, key=len)

    def patch(owner, name, note):
        call = getattr(owner, name)

        @functools.wraps(call)
        def hook(*given, **named):
            note(name, frames())
            return call(*given, **named)

        monkeypatch.setattr(owner, name, hook)

    def from_the_command(name, stack):
        last = next(at for at, (path, _) in enumerate(stack) if path.endswith("engine/src/hal_engine/cli/run.py"))
        keep(("hook", name), stack[: last + 1])

    def from_the_hook(name, stack):
        hooks = [at for at, (path, called) in enumerate(stack) if not path and called in HOOKS]
        if hooks:
            keep(("primitive", name), [one for one in stack[: hooks[-1]] if one[0]])

    for name in HOOKS:
        patch(BoundDevice, name, from_the_command)
    for name, value in vars(SimPrimitives).items():
        if callable(value) and not name.startswith("_"):
            patch(SimPrimitives, name, from_the_hook)
    return found


def test_few_frames_lie_between_command_hook_and_primitive(deepest, capsys):
    arguments = ("--prompt", "def main(", "--prompt", "import os", "--max-tokens", "6", "--speculate", "ngram")
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "sim", "-q", *arguments])
    assert {name for kind, name in deepest if kind == "hook"} == {*HOOKS}, capsys.readouterr().err
    assert {"launch", "copy_in", "copy_out", "event_record"} <= {name for kind, name in deepest if kind == "primitive"}
    limits = {"hook": TO_A_HOOK, "primitive": TO_A_PRIMITIVE}
    over = {key: stack for key, stack in deepest.items() if len(stack) > limits[key[0]]}
    assert not over
