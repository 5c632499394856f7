"""The maca device on the simulated accelerator, under the type name metax_gpu. No test here ran on the chip."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hal_conformance import KitProcess
from hal_core.devices import HeldPort
from hal_core.errors import Unavailable
from hal_maca import MacaPlugin

import hal
from hal.cli import main

HERE = Path(__file__).parent
ADVERSARIAL = {"HALSIM_MODE": "2", "HALSIM_STAGED": "0", "HALSIM_SYNC_DRAINS": "0", "HALSIM_POLLS": "2"}
"""Polls: an event is "not ready" once before its work runs; hal polls again, so more would be the same."""
MODES = {"eager": {"HALSIM_MODE": "0"}, "worker": {"HALSIM_MODE": "1"}, "lazy": {"HALSIM_MODE": "2"}}
MODES["adversarial"] = ADVERSARIAL

pytestmark = pytest.mark.long(80)
HANGS = 900
"""Seconds after which a run of the kit counts as hung, on a busy machine."""


@pytest.fixture(scope="module")
def sim():
    """The environment in which a process finds the simulated accelerator; built once."""
    from hal_sim.build import NoCompiler, paddle_device

    try:
        paddle_device()
    except (NoCompiler, Unavailable) as error:
        pytest.skip(str(error))
    return {**os.environ, "HAL_MACA_PLACE": "sim", "GLOG_minloglevel": "1"}


@pytest.fixture(scope="module")
def answers(sim):
    """The answers of all probes, by name; one process, as each imports Paddle."""
    done = subprocess.run(
        [sys.executable, str(HERE / "probe.py")],
        env=sim | ADVERSARIAL | {"HALSIM_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# -- without the chip -----------------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    for name in ("HAL_MACA_PLACE", "HALSIM_NAME", "CUSTOM_DEVICE_ROOT"):
        monkeypatch.delenv(name, raising=False)


def test_without_the_chip_it_says_why_in_a_line_and_what_to_install(unset, monkeypatch):
    found = MacaPlugin.probe()
    assert not found.available
    assert "has no CustomDevice library, so no metax_gpu" in found.reason
    assert "metax_gpu of PaddleCustomDevice" in found.cure
    with pytest.raises(Unavailable, match="no metax_gpu"):
        hal.open_device("maca")
    monkeypatch.setattr("hal_paddle.plugin.installed_paddle", lambda: None)
    assert MacaPlugin.probe().reason == "paddle is not installed"


def test_an_unknown_substitute_is_named(unset, monkeypatch):
    monkeypatch.setenv("HAL_MACA_PLACE", "cpu")
    assert MacaPlugin.probe().reason == "HAL_MACA_PLACE=cpu is not a known substitute"


def test_the_simulator_under_the_type_name_is_never_shown_as_the_chip(unset, monkeypatch):
    monkeypatch.setenv("HALSIM_NAME", "metax_gpu")
    assert MacaPlugin.substituted() == "sim"
    assert MacaPlugin.probe().reason.startswith("substituted: sim")


def test_another_library_is_taken_for_what_it_is(unset, monkeypatch, tmp_path):
    (tmp_path / "libpaddle-custom-npu.so").touch()
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(tmp_path))
    reason = MacaPlugin.probe().reason
    assert reason.endswith("loads libpaddle-custom-npu.so; whether it provides metax_gpu is checked when opened")


def test_several_ranks_are_offered_where_a_simulator_stands_in(unset, monkeypatch):
    assert not MacaPlugin.support().ranks
    monkeypatch.setenv("HAL_MACA_PLACE", "sim")
    assert MacaPlugin.support().ranks


def test_probing_imports_neither_numpy_nor_paddle():
    code = "import sys, hal_maca; hal_maca.MacaPlugin.probe(); print({'numpy', 'paddle', 'hal_sim'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


# -- cost, and forbidden effects ------------------------------------------------------------------------------------


def test_an_insertion_of_128_has_one_upload_and_the_scatters_of_one(answers):
    got = answers["insertions"]
    assert got["name"] == "maca (substituted: sim):0"
    for cost in got["costs"]:
        assert cost["own"] == [4, 1, 3, 0]  # submissions, uploads, launches, host waits
        assert cost["seen"] == {"submissions": 4, "copies": 1, "launches": 3, "blocked_wait": 0, "fallback": 0}
        assert not cost["held"], "the ticket was done while the stream was held"
    assert got["races"] == []


def test_a_span_of_the_ring_is_written_again_only_after_its_copy(answers):
    got = answers["ring"]
    assert got["right"]
    assert got["races"] == 0
    assert got["waits"] > 0


def test_copies_of_one_stream_do_not_wait_for_those_of_another(answers):
    assert answers["copies_apart"] == {"held": False, "free": True, "then": True}


def test_a_close_that_a_held_write_outlasts_releases_nothing_that_it_reads(answers):
    assert answers["closed_while_held"] == {"known": True, "kept": True}


def test_the_checker_would_see_a_ring_without_fences(answers):
    assert answers["unfenced_ring"]["races"] > 0


def test_two_devices_in_one_process(answers):
    got = answers["two_devices"]
    assert got["names"] == ["maca (substituted: sim):0", "maca (substituted: sim):1"]
    assert got["values"] == [[9 + i for i in range(8)], [9 + 2 * i for i in range(8)]]
    assert got["races"] == []
    state, tensor, host = got["refused"]
    assert "another opened device" in state
    assert "the tensor is on Place(metax_gpu:1), but the target must be a Paddle tensor on Place(metax_gpu:0)" in tensor
    assert "the tensor is on Place(cpu)" in host


def test_bad_input_is_refused_with_the_cure(answers):
    index, option, kind = answers["bad_input"]
    assert "no device maca (substituted: sim):7: indices go from 0 to 1" in index
    assert "unknown options ['colour']" in option
    assert "Paddle knows no device type 'no_such_gpu'; it knows" in kind


# -- the kit, two ranks, the main job ---------------------------------------------------------------------------------


QUICK = ("-p", "hal_sim.pytest_races", "--hal-profile=quick", "--hal-examples=1", "--hal-hang=60")


@pytest.mark.conform
@pytest.mark.whole_kit
@pytest.mark.parametrize("mode", ["lazy", "adversarial"])
def test_the_conformance_kit_under_the_checker(sim, mode):
    """Work runs when it is waited for, and in the second mode none runs more than it must."""
    ours = "not g27"  # it reads the sources of the core: once, for cpu, is enough
    device = "maca:1" if mode == "adversarial" else "maca"
    environment = sim | MODES[mode] | {"HALSIM_DEVICES": "2"}
    with KitProcess(device, *QUICK, "-k", ours, environment=environment) as run:
        status = {entry["guarantee"]: entry["status"] for entry in run.report(HANGS)["guarantees"]}
    assert status["G3"] == status["G7"] == status["G23"] == "checked"
    assert {name for name, value in status.items() if value == "skipped"} <= {"G10", "G13", "G27", "G28"}


@pytest.mark.conform
def test_the_kits_tests_of_several_ranks(sim):
    """Agreement of 2 and of 2 x 2 ranks; a rank that hangs, and one that dies, in one pool of processes."""
    few = "g13_every or (hung and receiver-two-by-two) or (lost_rank and two-ranks)"
    with KitProcess("maca", *QUICK, "--hal-only=G13,G16", "-k", few, environment=sim | ADVERSARIAL) as run:
        report = run.report(HANGS)
    tests = [test for entry in report["guarantees"] for test in entry["tests"]]
    assert [test["outcome"] for test in tests] == ["passed"] * 3, tests


def ranks(sim, what, **options):
    with contextlib.ExitStack() as stack:
        master, *ends = [f"127.0.0.1:{stack.enter_context(HeldPort()).number}" for _ in range(3)]
        return ranks_on(sim, what, master, ends, options)


def ranks_on(sim, what, master, ends, options):
    from hal_sim import paddle_env

    started = []
    for rank in range(2):
        variables = paddle_env.distributed(rank, ends, master, "metax_gpu", devices=1, **options)
        environment = sim | variables | {"FLAGS_selected_metax_gpus": "0"}
        command = [sys.executable, str(HERE / "rank.py"), what]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        return [(process, *process.communicate(timeout=60)) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.steady
@pytest.mark.conform
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["eager", "worker", "lazy"])
def test_two_ranks_agree_by_one_collective_a_call_without_races(sim, mode):
    for process, out, err in ranks(sim, "agree", mode=mode, staged=0):
        assert process.returncode == 0, err[-2000:]
        got = json.loads(out.splitlines()[-1])
        assert got["accept_tokens"] == list(range(12))
        assert len(set(got["seed"])) == 1, "a field that is not broadcast is each rank's own"
        assert (got["mode"], got["collectives"]) == ("async", 6)
        assert (got["races"], got["fallback"]) == ([], 0)


@pytest.mark.conform
def test_a_lost_rank_is_an_error_on_the_survivor_in_time(sim):
    """In ``make test`` the core's watchdog, which reports it, is met on other devices."""
    survivor, _ = ranks(sim, "lost", mode=1, collective_timeout_ms=3000)
    process, out, err = survivor
    assert process.returncode == 0, err[-2000:]
    got = json.loads(out.splitlines()[-1])
    assert got["error"].startswith("GroupLost: ")
    assert got["seconds"] < 20


def test_the_main_job_gives_the_tokens_of_the_cpu(sim, capsys):
    prompts = ["--prompt", "def main(", "--prompt", "for i in range(", "--prompt", "with open("]
    options = [*prompts, "--temperature=0", "--max-tokens", "12", "--slots", "2", "--json"]
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "cpu", *options])
    found = [[json.loads(line) for line in capsys.readouterr().out.splitlines()]]
    command = [sys.executable, "-c", "from hal.cli import main; main()", "run", "--device", "maca", "-v", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=sim | ADVERSARIAL, timeout=120, check=False)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err[-2000:]
    found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    tokens = [[answer["token_ids"] for answer in answers] for answers in found]
    assert [len(row) for row in tokens[0]] == [12, 12, 12]
    assert tokens[0] == tokens[1]
    assert "\nhal: steps do not overlap: the Paddle model needs the host between two steps" in err
    assert err.endswith(" tokens/s), device maca (substituted: sim):0, model on cpu\n")
    assert "falls back" not in err
    stated = {"name": "maca (substituted: sim):0", "substituted": "sim", "fallbacks": {}}
    assert [answer["device"] for answer in found[1]] == [stated] * 3
