"""Terminal output: no control characters of prompts and answers, a listing that fits, few lines after Ctrl-C."""

import io
import itertools
import json
import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import FinishReason, OutputRecord, SlotStatus
from hal_engine.cli import screen
from hal_engine.cli.run_output import Answers, drive, summarize
from hal_engine.cli.tail import Printer
from hal_engine.engine import Finished

from hal.cli import console, devices, logs, main, signals, tree
from hal.device_list import Listed

from .commands import Terminal

EVIL = "a\x1b[31mred\x07\x7f\x9b2J\rb\tc\nd"
ESCAPED = "a\\x1b[31mred\\x07\\x7f\\x9b2J\\x0db\tc\nd"


@pytest.fixture
def streams(monkeypatch):
    """Set standard output and error, each a terminal or not."""

    def made(out, err):
        monkeypatch.setattr(sys, "stdout", Terminal() if out else io.StringIO())
        monkeypatch.setattr(sys, "stderr", Terminal() if err else io.StringIO())
        return sys.stdout, sys.stderr

    return made


def test_control_characters_are_escaped_on_a_terminal_alone():
    assert console.shown(EVIL, Terminal()) == ESCAPED
    assert console.shown(EVIL, io.StringIO()) == EVIL
    assert console.shown("schön \u4e2d \U0001f600", Terminal()) == "schön \u4e2d \U0001f600"


@pytest.mark.parametrize(("out", "err"), [*itertools.product([False, True], repeat=2)])
def test_no_screen_hands_control_characters_to_a_terminal(streams, monkeypatch, out, err):
    monkeypatch.setenv("TERM", "dumb")  # rich then writes no control characters of its own
    output, errors = streams(out, err)
    shown = screen.open_screen()
    shown.write(EVIL)
    shown.write("\n")
    shown.note(EVIL)
    shown.close()
    text_shown, noted = output.getvalue(), errors.getvalue()
    if not out:
        assert EVIL in text_shown
    for is_terminal, text in ((out, text_shown), (err, noted)):
        assert not (is_terminal and any(mark in text for mark in "\x1b\x07\x7f\x9b")), repr(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_around_the_answers_and_of_tail_are_escaped_as_well(streams, terminal):
    output, errors = streams(terminal, terminal)
    with logs.printed(None):
        logging.getLogger("hal").warning("log %s", EVIL)
    console.say(EVIL)
    printer = Printer(as_json=False, request=None)
    printer._print(EVIL)
    wanted = ESCAPED if terminal else EVIL
    assert output.getvalue() == f"{wanted}\n"
    assert errors.getvalue() == f"hal: log {wanted}\n{wanted}\n"


def test_what_is_shown_of_an_opened_device_keeps_its_indent(streams, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    output, _ = streams(True, True)
    reason = "host memory: no copy engine takes the write"
    devices._print_opened(
        "cpu", {"seconds": 0.5, "capabilities": {}, "fallbacks": {"async_set_value": reason}, "note": ""}
    )
    assert [line.rstrip() for line in output.getvalue().splitlines()] == [
        "",
        "cpu: opened in 0.5 s",
        "  async_set_value falls back: host",
        "  memory: no copy engine takes the write",
    ]


ROWS = (
    Listed(
        "maca",
        "paddle-hal-maca",
        "1.0.0",
        ">=1.0,<2",
        -1,
        "unavailable",
        "Paddle 3.3.1 (built for the CPU) has no CustomDevice library, so no metax_gpu",
        "install Paddle with MetaX's CustomDevice plugin, or run without the chip: HAL_MACA_PLACE=sim",
    ),
    Listed("cpu", "paddle-hal-core", "1.1.0", "embedded", 0, "available", "host memory"),
)


@pytest.mark.parametrize(("width", "lines"), [(28, 20), (40, 14), (60, 10), (80, 9), (120, 7), (160, 5)])
def test_the_listing_is_readable_in_any_width(streams, monkeypatch, width, lines):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    output, _ = streams(True, False)
    devices._print_devices(ROWS)
    shown = re.sub("\x1b\\[[0-9;]*m", "", output.getvalue()).splitlines()
    assert len(shown) <= lines, "\n".join(shown)
    assert max(map(len, shown)) <= width
    words = " ".join(shown).split()
    for row in ROWS:
        for word in (row.name, row.distribution, row.version, row.status, *row.reason.split(), *row.cure.split()):
            assert any(word in each for each in words), f"{word} is broken in two, or missing"


class Counting:
    """A screen that counts its calls."""

    def __init__(self):
        self.calls, self.written = 0, []

    def write(self, text):
        self.calls += 1
        self.written.append(text)

    def note(self, text):
        self.calls += 1
        self.written.append(f"{text}\n")

    def progress(self, text):
        self.calls += 1

    def close(self):
        pass


class Aborting:
    """An engine in which the first request streams and all later ones wait, until they are aborted."""

    def __init__(self, interrupt):
        self._interrupt, self._waiting, self._ended = interrupt, [], []

    @property
    def busy(self):
        return bool(self._waiting or self._ended)

    def submit_all(self, requests):
        self._waiting += [request.request_id for request in requests]

    def abort(self, name):
        self._ended.append(Finished(name, (), FinishReason.ABORT, reported=False))
        self._waiting = []

    def step(self):
        self._interrupt()
        ended, self._ended = self._ended, []
        return ended


class Text:
    """A stand-in for an answer's text."""

    text, settled, has_stops = "tokens", 6, False

    def add(self, tokens):
        return ""

    def take(self):
        return ""

    def finish(self):
        pass


def interrupted(monkeypatch, count, **options):
    """Return a screen after Ctrl-C in ``count`` prompts, and the command's final message."""
    came = []
    monkeypatch.setattr("hal_engine.cli.run_output.signals.came", lambda: 2 if came else None)
    requests = [SimpleNamespace(request_id=f"r{at}", params=SimpleNamespace(logprobs=None)) for at in range(count)]
    plan = SimpleNamespace(requests=requests, prompts=["x"] * count, answer=lambda request: Text())
    counting = Counting()
    answers = Answers(plan, counting, **{"device": None} | options)
    answers.take(first_token())
    before = len("".join(counting.written).splitlines()), counting.calls
    drive(Aborting(lambda: came.append(1)), plan, answers, SimpleNamespace(error=None, end=answers.end))
    lines = "".join(counting.written).splitlines()
    return lines[before[0] :], counting.calls - before[1], answers.cut_off


def first_token():
    return OutputRecord(
        step=0,
        request_ids=("r0",),
        status=np.array([SlotStatus.TOKEN], np.uint8),
        finish=np.array([FinishReason.NONE], np.uint8),
        positions=np.array([0]),
        counts=np.array([1], np.int32),
        tokens=np.array([5]),
        first_token=np.array([False]),
        logprob_token_ids=None,
        logprobs=None,
        ranks=None,
    )


@pytest.mark.parametrize("count", [1, 3000])
def test_after_an_interrupt_text_has_two_lines_however_many_prompts_wait(monkeypatch, count):
    lines, calls, message = interrupted(monkeypatch, count)
    assert lines == []
    assert calls <= 4, "what is done on the screen does not grow with the prompts"
    assert message == f"interrupted: {count} of {count} prompt{'s' * (count > 1)} not answered to the end"


def test_after_an_interrupt_json_has_an_object_for_each_prompt(monkeypatch):
    lines, _, message = interrupted(monkeypatch, 3, device={"name": "cpu:0"})
    assert [json.loads(line)["finish_reason"] for line in lines] == ["abort"] * 3
    assert message == ""


def test_after_an_interrupt_no_status_is_left(streams, monkeypatch):
    def invoke(arguments):
        console.status("starting the ranks")
        raise signals.Interrupted

    monkeypatch.setattr(tree, "invoke", invoke)
    errors = streams(False, True)[1]
    with pytest.raises(SystemExit):
        main(["run"])
    assert errors.getvalue() == "\rstarting the ranks\x1b[K\r\x1b[K"


@pytest.mark.parametrize(("verbose", "live"), [(False, False), (True, False), (False, True)])
def test_the_closing_line_is_complete_however_long(verbose, live):
    """It names the stand-in, at its end; a terminal wraps it."""
    counting = Counting()
    answers, options = SimpleNamespace(tokens=10, cut_off=""), SimpleNamespace(quiet=False, verbose=verbose, live=live)
    parts = {
        "seconds": 2.0,
        "place": f"device {'x' * 200} (sim)",
        "details": ["one"],
        "notes": ["two", "three"],
    }
    summarize(counting, answers, options, **parts)
    *before, line = "".join(counting.written).splitlines()
    assert before == (["one", "two", "three"] if verbose else ["one"] * live)
    more = "" if verbose else "; 2 notes (-v shows them)"
    assert line == f"10 tokens in 2.00 s (5.0 tokens/s), device {'x' * 200} (sim){more}"
