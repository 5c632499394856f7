"""A CPU on which Paddle cannot be imported: one line, before the import, from every command that would import it."""

import subprocess
import sys
import textwrap

import pytest
from hal_core import StateConfig, Unavailable
from hal_core.devices import check_processor, processor
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.starting import RankStart
from hal_paddle.places import import_paddle

from .commands import environment, left_in

SANDY_BRIDGE = frozenset({"SSE2", "SSE42", "POPCNT", "AVX"})
#: hal on that CPU; the import of Paddle, which would end in SIGILL there, ends the process with another status.
THERE = f"""
    import os, sys
    from hal_core.devices import processor

    class Deadly:
        def find_spec(self, name, path, target=None):
            if name.startswith("paddle."):
                os._exit(132)

    sys.meta_path.insert(0, Deadly())
    processor.processor_features = lambda: {SANDY_BRIDGE!r}
    from hal.cli import main
    main()
"""
LINE = "Paddle cannot be imported: this CPU has no AVX2 (use an x86 CPU from Haswell (Intel, 2013) or "


def there(folder, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(THERE), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(folder, **variables),
        cwd=folder,
    )
    assert left_in(folder) == []
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--prompt", "x"),
        ("run", "--prompt", "x", "--tp", "2"),
        ("run", "--prompt", "x", "--device", "xpu", "--runner", "anything:Runner"),
    ],
    ids=" ".join,
)
def test_a_command_that_needs_paddle_says_so_in_one_line(tmp_path, arguments):
    done = there(tmp_path, *arguments, HAL_XPU_PLACE="cpu")
    assert (done.returncode, done.stdout) == (2, ""), done
    device = "xpu: " if "xpu" in arguments else ""
    assert done.stderr.startswith(f"hal: error: {device}{LINE}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("door", [check_processor, lambda: import_paddle("xpu", "cure")])
def test_a_library_user_gets_an_error(monkeypatch, door):
    monkeypatch.setattr(processor, "processor_features", lambda: SANDY_BRIDGE)
    with pytest.raises(Unavailable, match="this CPU has no AVX2"):
        door()


def test_ranks_of_the_paddle_model_are_refused_before_one_is_started(monkeypatch):
    monkeypatch.setattr(processor, "processor_features", lambda: SANDY_BRIDGE)
    sizes = StateConfig(num_slots=1, max_model_len=16)
    setup = Setup(model="unread", sizes=sizes, blocks=1, tp=2, timeout=1.0)
    with RankStart(setup, "cpu") as start, pytest.raises(Unavailable, match="this CPU has no AVX2"):
        start(setup)


def test_other_kinds_of_cpu_are_not_refused(monkeypatch):
    for features in (SANDY_BRIDGE | {"AVX2"}, frozenset({"NEON", "ASIMD"})):
        monkeypatch.setattr(processor, "processor_features", lambda features=features: features)
        check_processor()


def test_the_features_are_those_that_numpy_has_found():
    features = processor.processor_features()
    assert features & {"SSE2", "NEON", "VSX", "VX", "RVV"}
    assert not {name for name in features if not name.isupper()}
