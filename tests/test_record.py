"""``hal run --record`` with the model that ships, and the replay on devices and on liars."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from pathlib import Path

import pytest
from hal_conformance.opening import subject
from hal_conformance.replay.frames import Recording
from hal_conformance.replay.player import replay
from hal_sim import NoCompiler
from hal_sim.build import core_library

from hal.cli import main

ROOT = Path(__file__).parents[1]
PROMPTS = ("def main(", "class Stack:", "for i in range(", "import os")
RUNS = {
    "plain": ("--slots", "3", "--max-tokens", "24"),
    "drafts": ("--slots", "3", "--max-tokens", "24", "--temperature", "0", "--speculate", "ngram"),
    "preemptions": ("--slots", "4", "--blocks", "6", "--max-tokens", "60", "--chunk", "4", "--logprobs", "2", "--json"),
}
LAST = {"drafts": "set_drafts", "preemptions": "preempted"}


def run(path, *arguments, device="cpu"):
    """Run the command here with a recording; its exit status."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    shown = "--json" if "--json" in arguments else "-q"
    with pytest.raises(SystemExit) as end:
        main(["run", shown, "--device", device, *prompts, *arguments, "--record", str(path)])
    return end.value.code or 0


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A recording of each kind."""
    folder = tmp_path_factory.mktemp("recordings")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name, arguments in RUNS.items():
        assert run(folder / name, *arguments) == 0
    patch.undo()
    return folder


def no_sim():
    try:
        core_library()
    except NoCompiler as error:
        return str(error)
    return ""


@pytest.fixture
def device(request, monkeypatch):
    """The subject of a name; the cuda device runs over its tests' stand-in driver, natively or not."""
    name, _, path = request.param.partition(" ")
    if name == "cuda":
        if why := no_sim():
            pytest.skip(why)
        monkeypatch.syspath_prepend(str(ROOT / "plugins/cuda/tests"))
        monkeypatch.setenv("HAL_CUDA_NATIVE", str(int(path == "native")))
        return subject(factory="kit_native:opened")
    if name == "sim" and (why := no_sim()):
        pytest.skip(why)
    if name == "opencl":
        probe = pytest.importorskip("hal_opencl").OpenCLPlugin.probe()
        if not probe.available:
            pytest.skip(f"{probe.reason} ({probe.cure})")
    return subject(name)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("device", ["cpu", "sim", "opencl", "cuda native", "cuda python"], indirect=True)
def test_a_recording_of_the_model_is_replayed_on(device, recordings, kind):
    differs, told = replay(device, recordings / kind)
    assert not differs, told
    assert "0 records" not in told


@pytest.mark.parametrize("kind", LAST)
def test_the_recordings_have_what_they_are_named_for(recordings, kind):
    told = set()
    for frame in Recording(recordings / kind).frames():
        told.add(frame.name)
        if frame.name == "insert_tasks":
            told |= {row[0].name.lower() for row in frame.given[0]}
    assert LAST[kind] in told


@pytest.mark.parametrize(
    ("liar", "kind", "said"),
    [
        ("warm_up", "plain", ", update_inputs of step 0: accept_num[0, 0] is "),
        ("by_id", "preemptions", ", insert_tasks (prefill -> slot "),
    ],
)
def test_liars_that_quick_does_not_kill_die_by_replay(monkeypatch, recordings, liar, kind, said):
    monkeypatch.syspath_prepend(str(ROOT / "conformance/tests"))
    differs, told = replay(subject(factory=f"replayed_liars:{liar}"), recordings / kind)
    assert differs
    assert re.match(rf"after call [1-9]\d*{re.escape(said)}", told)


def test_a_run_ahead_of_its_device_is_replayed(tmp_path, monkeypatch):
    """Tokens are made on the device, and records are taken one step late."""
    if why := no_sim():
        pytest.skip(why)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mixed = ("--runner", "hal_sim.mixing:MixRunner", "--temperature", "0", "--overlap", "on")
    for name, more in (("plain", ()), ("drafts", ("--drafts", "3"))):
        assert run(tmp_path / name, *mixed, "--slots", "2", "--max-tokens", "12", *more, device="sim") == 0
        differs, told = replay(subject("sim"), tmp_path / name)
        assert not differs, told


def test_equal_runs_make_equal_calls(recordings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    again, other = tmp_path / "again", tmp_path / "other"
    assert run(again, *RUNS["plain"]) == run(other, *RUNS["plain"], "--seed", "1") == 0
    first, equal, unequal = [[*Recording(path).frames()] for path in (recordings / "plain", again, other)]
    assert first == equal
    assert first != unequal


def test_the_command_replays(recordings, capsys):
    for arguments, code, said in (
        (("cpu", "--replay", recordings / "plain"), 0, "cpu: "),
        (("cpu", "--replay", recordings / "plain", "--liar", "NoRowReset"), 1, "NoRowReset: after call "),
    ):
        with pytest.raises(SystemExit) as end:
            main(["conform", *map(str, arguments)])
        assert end.value.code == code
        assert capsys.readouterr().out.startswith(said)


def test_options_that_a_replay_does_not_use_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["conform", "cpu", "--replay", "x", "--seed", "0"])
    assert end.value.code == 2
    assert "--seed: --replay makes the calls of a recording and runs no test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--record", "x", "--tp", "2"),
            "--record: a recording has the calls of one rank (leave it out, or run one rank)",
        ),
        (
            ("--record", "/nowhere/x"),
            "--record: No such file or directory: /nowhere/x (make its folder, or name another file)",
        ),
        (("--record", "/"), "--record: Is a directory: / (name a file in it)"),
        (("--record", "/dev/full"), "--record: No space left on device"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--max-tokens", "2", "--prompt", "x", "-q", *arguments])
    assert end.value.code == 2
    assert f"hal: error: {said}" in capsys.readouterr().err


def test_a_sink_that_nobody_reads_is_named_as_typed(capsys, monkeypatch):
    """Another program listens there."""
    monkeypatch.setenv("HAL_SECONDS_SINK_CLOSE", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SystemExit) as end:
            main(["run", "x", "--device", "cpu", "--max-tokens", "2", "-q", "--sink", url])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("hal: error: --sink: not acknowledged by a reader: r0 at 0 ")
    assert f"no reader answers on {url}" in error


def test_without_the_kit_record_says_how_to_install_it(capsys, monkeypatch):
    find = importlib.util.find_spec
    assert find("hal_conformance") is not None
    monkeypatch.setitem(sys.modules, "hal_conformance", None)
    monkeypatch.setitem(sys.modules, "hal_conformance.replay.recorder", None)
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--max-tokens", "2", "--prompt", "x", "--record", "x"])
    assert end.value.code == 2
    assert "pip install ./conformance in hal's checkout" in capsys.readouterr().err


def test_help_all_lists_record(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    assert "--record FILE" in capsys.readouterr().out
