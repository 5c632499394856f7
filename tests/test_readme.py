"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_library_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.strip().splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[5 6 7]\n"


def test_the_folders_of_the_table_are_there():
    root = Path(__file__).parents[1]
    named = re.findall(r"^\| `([\w/]+)`", README, re.M)
    assert len(named) >= 10
    assert all((root / folder).is_dir() for folder in named)
