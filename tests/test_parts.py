"""The runner of parts: it reports each part's time, shows a failure whole, and at a limit ends the parts and names
them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "parts.py"
#: Starts a process, writes its number to a pipe, and waits forever: both must be ended.
HANGS = "import subprocess as s; c = s.Popen(['sleep', '1000']); open({pipe!r}, 'w').write(str(c.pid)); c.wait()"


@pytest.fixture(scope="module")
def parts():
    spec = importlib.util.spec_from_file_location("hal_parts", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(parts, capfd):
    """Run parts given as name to Python code; return the status and the output. Signal handlers are restored.

    ``alone``: names of those that run alone.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(codes, alone=(), **plan):
        command = f"{sys.executable} -c"
        made = tuple(parts.Part(name, f"{command} {code!r}", alone=name in alone) for name, code in codes.items())
        status = parts.Runner(parts.Plan(made, **plan)).run(made)
        return status, capfd.readouterr().out

    yield call
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_every_part_is_told_with_its_time_and_what_went_well_says_no_more(run):
    status, out = run({"one": "print(7 * 191)", "two": "pass"})
    assert status == 0
    assert len(re.findall(r"^== (?:one|two): well, \d+ s, \d+ s of processor time$", out, re.MULTILINE)) == 2
    assert "1337" not in out
    assert re.search(r"== 2 parts in \d+ s, all went well", out)


def test_what_fails_is_shown_whole_and_the_others_go_on(run):
    status, out = run({"one": "print(7 * 191); raise SystemExit(3)", "two": "pass"})
    assert status == 1
    assert "== one: FAILED with 3, " in out
    assert "1337" in out
    assert "== two: well" in out
    assert "failed: one" in out


def test_a_command_that_is_not_there_fails_its_part_alone(parts, run, capfd):
    made = (parts.Part("one", "no/such/command"), parts.Part("two", "true"))
    status = parts.Runner(parts.Plan(made)).run(made)
    out = capfd.readouterr().out
    assert status == 1
    assert "== one: FAILED, it did not begin: " in out
    assert "== two: well" in out
    assert "failed: one" in out


def test_a_part_that_cannot_run_here_is_skipped_with_its_reason(run):
    status, out = run({"one": "print('so'); print('no such program'); raise SystemExit(77)", "two": "pass"})
    assert status == 0
    assert "== one: skipped, no such program\n" in out
    assert "== two: well" in out


def test_what_fails_alone_stops_the_plan_and_the_rest_is_named(run):
    status, out = run({"one": "raise SystemExit(3)", "two": "print('no')"}, alone={"one"})
    assert status == 1
    assert "== two: not begun, since one failed" in out
    assert "failed: one, two" in out


def test_one_part_alone_and_then_two_at_a_time(parts):
    first, *others = (parts.Part(name, "true", alone=name == "a") for name in "abcd")
    stages = parts.Plan((first, *others)).stages((first, *others))
    assert [[part.name for part in stage] for stage in stages] == [["a"], ["b", "c", "d"]]
    alone = [parts.Part(name, "true", alone=True) for name in "ab"]
    assert [len(stage) for stage in parts.Plan(tuple(alone)).stages(alone)] == [1, 1]


def test_parts_of_one_stage_run_beside_each_other(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening one end waits for the other
    codes = {"one": f"open({str(pipe)!r}, 'w').write('x')", "two": f"assert open({str(pipe)!r}).read() == 'x'"}
    assert run(codes)[0] == 0


def wait_until_gone(process):
    """A killed process takes a moment to go; one that was not killed makes this fail."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(1000):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        threading.Event().wait(0.02)
    pytest.fail(f"process {process} was left behind")


def test_the_limit_names_what_still_runs_and_ends_all_it_started(run, parts, tmp_path, monkeypatch):
    """The part itself triggers the limit, once it runs: the test does not depend on its speed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    children, true = [], parts.Runner._start

    def noted(runner, part, output):
        process = true(runner, part, output)
        children.append(int(pipe.read_text()))
        threading.Thread(target=runner.end, args=["the limit of 9 s is over"]).start()
        return process

    monkeypatch.setattr(parts.Runner, "_start", noted)
    status, out = run({"hangs": HANGS.format(pipe=str(pipe)), "late": "print('no')"}, beside=1)
    assert status == 1
    assert "== hangs: the limit of 9 s is over, and it still runs" in out
    assert "== late: not begun, since the limit of 9 s is over" in out
    assert len(children) == 1
    wait_until_gone(children[0])


def test_a_limit_that_is_over_fails_though_nothing_else_does(run):
    status, out = run({"hangs": "import time; time.sleep(1000)"}, limit=1.0)
    assert status == 1
    assert "== hangs: the limit of 1 s is over, and it still runs" in out
    assert "failed: hangs" in out


def test_a_run_is_written_down(parts, monkeypatch, tmp_path):
    plan = parts.Plan((parts.Part("one", "true"), parts.Part("two", "false", alone=True), parts.Part("three", "true")))
    monkeypatch.setitem(parts.PLANS, "nightly", plan)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    page = tmp_path / "page.md"
    assert parts.main(["nightly", "--record", str(page)]) == 1
    for number, handler in kept.items():
        signal.signal(number, handler)
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        ["| one", "well"],
        ["| two", "FAILED"],
        ["| three", "not begun"],
    ]


def test_every_plan_can_be_listed_and_ci_has_a_limit_within_ninety_minutes(parts):
    for plan in parts.PLANS:
        done = subprocess.run([sys.executable, TOOL, plan, "--list"], capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) == len(parts.PLANS[plan].parts)
    assert parts.CI[0].command == "make test"
    assert parts.CI[0].alone
    assert parts.CI[1] is parts.RAY
    assert parts.RAY.alone, "it installs hal anew, under what else would run"
    assert parts.CI[2 : 2 + len(parts.CONFORM)] == parts.CONFORM
    assert 0 < parts.PLANS["ci"].limit + 2 * parts.ENDING < 90 * 60
    assert "tools/parts.py ci" in (ROOT / ".ci" / "run").read_text()


def test_parts_are_chosen_by_words_of_their_names():
    chosen = subprocess.run(
        [sys.executable, TOOL, "conform", "kit: cpu", "matrix", "--list"], capture_output=True, text=True
    )
    assert [line.split()[0] for line in chosen.stdout.splitlines()] == ["kit:", "matrix,"]
    unknown = subprocess.run([sys.executable, TOOL, "conform", "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "no part has one of ['nothing'] in its name" in unknown.stderr
