"""docs/worker.md: its worker runs unchanged; and docs/slot-fields.md."""

import re
import runpy
from pathlib import Path

import pytest
from hal_core.slots.fields import STATE_TABLE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "worker.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_worker_runs_and_prints_what_the_page_says(capsys):
    code, _ = CODE
    (printed,) = re.findall(r"```\n(step.*?)```", PAGE, re.S)
    assert len(code.splitlines()) <= 60
    exec(compile(code, "worker.md", "exec"), {})
    assert capsys.readouterr().out == printed


def lines_by_request(printed):
    """The tokens and the end of each request in what a worker printed."""
    tokens, ends = {}, {}
    for name, listed, end in re.findall(r"^step \d+: (\w+) \[(.*)\] (\w+)$", printed, re.M):
        tokens.setdefault(name, []).extend(map(int, listed.split(", ")))
        ends[name] = end
    return tokens, ends


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_step_with_drafts_gives_the_same_tokens_in_fewer_steps(capsys, device):
    plain, drafting = CODE
    plain = plain.replace("max_tokens=3 + slot", "max_tokens=7 + slot").replace('"cpu"', f'"{device}"')
    exec(compile(plain, "worker.md", "exec"), {})
    expected = capsys.readouterr().out
    parts, opened, main = plain.partition("with hal.open_device")
    main = main.replace("vocab_size=VOCAB", "vocab_size=VOCAB, max_draft_tokens=DRAFTS")
    main = main.replace("run_step(", "run_drafting_step(")
    exec(compile(parts + drafting + opened + main, "worker.md", "exec"), {})
    printed = capsys.readouterr().out
    assert lines_by_request(printed) == lines_by_request(expected)
    assert (len(expected.splitlines()), len(printed.splitlines())) == (15, 9)


def test_the_page_of_fields_is_that_of_the_slot_table():
    made = runpy.run_path(str(ROOT / "tools" / "state_table.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run python tools/state_table.py"


def test_each_field_says_what_it_means_and_some_call_writes_it():
    made = runpy.run_path(str(ROOT / "tools" / "state_table.py"))
    assert [field.name for field in STATE_TABLE if not field.about or not made["writers"](field)] == []
