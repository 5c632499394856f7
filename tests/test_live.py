"""``hal run --live``: its lines are the engine's own figures, and none is wider than the terminal."""

import io
import re
import sys

import pytest
from hal_engine.cli import screen
from hal_engine.cli.live import LivePanel
from hal_engine.generation.plan import ModelPlan
from hal_engine.opening import open_engine
from hal_engine.options import engine_options

from .commands import LIBRARIES, Terminal

WARM = LIBRARIES


def test_the_lines_are_the_engines_figures():
    plan, tokens = ModelPlan(None), [0]

    def took(record):
        tokens[0] += len(record.tokens)

    options = {"device": "cpu", "slots": 2, "speculate": "ngram", "drafts": 2}
    with open_engine(plan.serve(engine_options(options)), took) as opened:
        panel = LivePanel(opened, 2, ["x falls back: y"])
        params = plan.params(None, temperature=0.0, max_tokens=40, ignore_eos=True)
        opened.engine.submit_all([plan.request(f"r{at}", [5, 6, 7] * 9, params) for at in range(3)])
        assert "0 of 2, 3 waiting, 0 % of the KV blocks" in panel.text("first", 0)
        while tokens[0] < 12 or not opened.acceptance().drafted:
            opened.engine.step()
        lines = panel.text("later", tokens[0]).splitlines()
        found = opened.acceptance()
        drafts = f"% of {found.drafted} accepted, {found.tokens_a_turn:.2f} tokens a step"
        while opened.engine.busy:
            opened.engine.step()
        last = panel.text("last", tokens[0])
    assert [line.split()[0] for line in lines] == ["later", "slots", "speed", "drafts", "hooks", "x"]
    assert "[####################] 2 of 2, 1 waiting" in lines[1]
    assert drafts in lines[3]
    assert re.search(r"insert_tasks \d+ us.*save_output \d+ us", lines[4])
    assert "[....................] 0 of 2, 0 waiting" in last


@pytest.mark.parametrize("columns", [28, 60, 80, 120])
@pytest.mark.parametrize("is_output", [False, True])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns, is_output):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal if is_output else io.StringIO())
    shown = screen.open_screen()
    shown.progress("\n".join(["a line of the panel " * 9] * 4))
    shown._live.refresh()  # its thread does so 20 times a second
    shown.close()
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert text.count("a line of the") >= 4
    assert max(map(len, re.split(r"[\r\n]", text))) <= columns
