"""docs/worker.md: its worker runs unchanged, and its table lists the slot's fields."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "worker.md").read_text(encoding="utf-8")


def test_the_worker_runs_and_prints_what_the_page_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (printed,) = re.findall(r"```\n(step.*?)```", PAGE, re.S)
    assert len(code.splitlines()) <= 60
    exec(compile(code, "worker.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_is_that_of_the_slots_fields():
    made = runpy.run_path(str(ROOT / "tools" / "state_table.py"))
    assert made["written"](PAGE) == PAGE, "run python tools/state_table.py"
