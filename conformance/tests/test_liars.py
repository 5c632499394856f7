"""The kit is tested by liars: each must be killed by a test of its own guarantee, by assertion."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import hal_conformance
import pytest
from hal_conformance.liars import everyone
from hal_conformance.report import running
from hal_conformance.report.command import Options

LIARS = {liar.name: liar for liar in everyone()}
pytestmark = pytest.mark.conform
HANGS = 1500
"""Seconds after which a run of all liars is taken to hang; it takes three to five minutes."""
STREAMS = {"async_h2d", "async_d2h", "can_hold_stream", "probe_counts", "primitives", "staging"}
DRIVER = {"pinned_host", "native_objects"}
"""Capabilities that neither cpu nor the asynchronous example has: liars that need them run on an OpenCL driver."""
NEEDS_DRIVER = {name for name, liar in LIARS.items() if DRIVER & set(liar.requires)}
ON_SIM = {
    name
    for name, liar in LIARS.items()
    if "timed_events" in liar.requires or ("several_memories" in liar.requires and STREAMS & set(liar.requires))
}
"""Liars about timed events, and about one submission over several memories behind a stream: sim has all of them."""
NEEDS_STREAMS = {name for name, liar in LIARS.items() if STREAMS & set(liar.requires)} - NEEDS_DRIVER - ON_SIM


def borne():
    """The guarantees of each test of the kit: its own, and those that it checks besides (``also``)."""
    found = {}
    for path in Path(hal_conformance.__file__).parent.glob("test_*.py"):
        for name, value in vars(importlib.import_module(f"hal_conformance.{path.stem}")).items():
            for mark in getattr(value, "pytestmark", ()):
                if mark.name == "guarantee":
                    found[name] = {int(mark.args[0]), *mark.args[3]}
    return found


BORNE = borne()


def started(*arguments):
    command = [sys.executable, "-m", "hal_conformance", *arguments, "--liars", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def table_of(process):
    out, _ = process.communicate(timeout=HANGS)
    table = json.loads(out)
    assert process.returncode == any(one["verdict"] not in ("killed", "skipped") for one in table)
    return {one["liar"]: one for one in table}


@pytest.fixture(scope="module")
def tables():
    """All run at once: most of their time they wait."""
    only = [
        ",".join(sorted({f"G{LIARS[name].guarantee}" for name in names}))
        for names in (NEEDS_STREAMS, NEEDS_DRIVER, ON_SIM)
    ]
    processes = {
        "cpu": started("cpu"),
        "queue": started("--device-factory=queued_device:keeping", f"--only={only[0]}"),
        **({} if without_driver() else {"opencl": started("opencl", f"--only={only[1]}")}),
        **({} if without_simulator() else {"sim": started("sim", f"--only={only[2]}")}),
    }
    try:
        found = {device: table_of(process) for device, process in processes.items()}
        for device, table in found.items():
            for one in table.values():
                if one["verdict"] != "skipped":
                    print(device, *[one[name] for name in ("guarantee", "liar", "profile", "seconds", "by")])
        yield found
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def without_driver():
    """Return why no OpenCL device can be used here, with the cure, or ""."""
    try:
        from hal_opencl import OpenCLPlugin
    except ModuleNotFoundError:
        return "paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'"
    probe = OpenCLPlugin.probe()
    return "" if probe.available else f"opencl: {probe.reason} ({probe.cure})"


def without_simulator():
    """Return why sim cannot be used here, or ""."""
    from hal_sim import SimPlugin

    probe = SimPlugin.probe()
    return "" if probe.available else f"sim: {probe.reason} ({probe.cure})"


@pytest.mark.parametrize("name", LIARS)
def test_every_liar_is_killed_by_a_test_of_its_guarantee(name, tables):
    verdict, number = tables["cpu"][name], LIARS[name].guarantee
    if name in NEEDS_STREAMS | NEEDS_DRIVER | ON_SIM:
        assert verdict["verdict"] == "skipped", verdict
        device = "opencl" if name in NEEDS_DRIVER else "sim" if name in ON_SIM else "queue"
        if why := {"opencl": without_driver, "sim": without_simulator, "queue": str}[device]():
            pytest.skip(why)
        verdict = tables[device][name]
    assert verdict["verdict"] == "killed", verdict["by"]
    assert number in BORNE[verdict["by"].partition("[")[0]]


def test_the_asynchronous_device_under_the_liars_conforms():
    """A test that it fails would kill every liar over it."""
    command = [sys.executable, "-m", "hal_conformance", "--device-factory=queued_device:keeping", "--profile=quick"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def test_there_are_liars_enough_and_their_stories_are_told():
    assert len(LIARS) >= 25
    assert all(liar.story for liar in LIARS.values())


def test_a_liar_that_lives_fails_the_command():
    code = (
        "import sys\n"
        "from hal_conformance import liars\n"
        "from hal_conformance.report.command import Options, run\n"
        "liars.everyone()\n"
        "liars.LIARS[:] = [liars.Liar('Honest', 25, 'it does not lie', type('Honest', (liars.Lie,), {}))]\n"
        "sys.exit(run(Options(device='cpu', liars=True)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "alive" in done.stdout
    assert "1 missed ['Honest']" in done.stdout


def verdict(name, guarantee, how, profile="", seconds=0.0, by=""):
    return running.Verdict(name, guarantee, f"the story of {name}", "", how, by, profile, seconds)


FIVE = [verdict(f"L{at}", "G1", "killed", "quick", at, "test_g01_x") for at in range(4)]
SKIPPED = verdict("NoStreams", "G3", "skipped", by="needs async_h2d")


def test_quick_must_kill_most_and_default_all():
    late = verdict("Late", "G2", "killed", "default", 9.5, "test_g02_y")
    assert running.Tally([*FIVE, late, SKIPPED], laddered=True).ok
    assert running.Tally([*FIVE, late], laddered=True).share == 0.8
    assert not running.Tally([*FIVE[1:], late], laddered=True).ok, "three of four is less than 80 %"
    assert running.Tally([*FIVE[1:], late], laddered=False).ok, "one profile was asked for, and it killed all"
    for how in ("alive", "crashed"):
        tally = running.Tally([*FIVE, verdict("Bold", "G2", how, "default")], laddered=True)
        assert (tally.ok, tally.alive) == (False, ["Bold"])
    assert "the longest to die: Late, 9.5 s of the profile default" in running.Tally([*FIVE, late], True).lines()


def test_a_liar_that_outlives_quick_meets_default(monkeypatch):
    met = []

    def judge(one, options, verdict, modules, say):
        if options.profile == "default":
            verdict.verdict, verdict.by = "killed", "test_g01_x"

    monkeypatch.setattr(running, "judge", judge)
    found = running.run(Options(device="cpu", only="G15"), met.append, lambda _: None)
    assert met == found
    assert (found[0].verdict, found[0].profile, found[0].by) == ("killed", "default", "test_g01_x")


def test_the_table_names_liar_guarantee_profile_and_seconds(tmp_path):
    tally = running.Tally([FIVE[2], SKIPPED], laddered=True)
    page = running.document(tally, html=True)
    assert "<td>G1<td>L2<td>killed<td>quick<td>2.0<td>test_g01_x" in page
    found = json.loads(running.document(tally, html=False))
    assert (found["ok"], found["quick"]) == (True, 1.0)
    fields = [found["liars"][0][name] for name in ("liar", "guarantee", "verdict", "by", "profile", "seconds")]
    assert fields == ["L2", "G1", "killed", "test_g01_x", "quick", 2]
    target = tmp_path / "liars.json"
    command = [sys.executable, "-m", "hal_conformance", "cpu", "--liars", "--only=G4", f"--report={target}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    line = next(line for line in done.stdout.splitlines() if "FirstWins" in line)
    assert line.split()[:4] == ["G4", "FirstWins", "killed", "quick"]
    rows = json.loads(target.read_text(encoding="utf-8"))["liars"]
    fields = next(row for row in rows if row["liar"] == "FirstWins")
    assert (fields["profile"], fields["seconds"] > 0) == ("quick", True)
