"""The README's example runs unchanged."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hal_engine.generation import local

import hal

from .commands import environment, left_in

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_examples_run(capsys):
    text, hooks = re.findall(r"```python\n(.*?)```", README, re.S)
    for example in (text, hooks):
        assert len(example.strip().splitlines()) <= 15
        exec(compile(example, "README.md", "exec"), {})
        printed = capsys.readouterr().out
        if example is text:
            assert printed.endswith(hal.generate("def main(", max_tokens=20, temperature=0))
    local._close()
    assert printed == "[5 6 7]\n"


def typed():
    """The commands that the README prints, but for ``make test``."""
    lines = re.findall(r"^    ((?:make|printf|\.venv/bin/hal) .*)$", README, re.M)
    assert "make test" in [line.partition("#")[0].strip() for line in lines]
    return [line for line in lines if not line.startswith("make test")]


def as_run(line):
    """The line with what ``make`` would run, and with this interpreter's hal."""
    if line.startswith("make "):
        words = shlex.split(line, comments=True)
        made = ["make", "--no-print-directory", "-C", str(ROOT), "-n", "-o", ".venv/.installed", *words[1:]]
        line = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    hal = shlex.join([sys.executable, "-c", "from hal.cli import main; main()"])
    return line.replace(".venv/bin/hal", hal)


def test_every_command_works_as_printed_one_after_the_other(tmp_path):
    outputs = {}
    for line in typed():
        done = subprocess.run(
            ["bash", "-c", as_run(line)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
            env=environment(tmp_path),
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert "Traceback" not in done.stderr
        outputs[line] = done.stdout
    text, _, answers, more, devices, doctor, _ = outputs.values()
    assert text.startswith("def main(")
    assert more.startswith("def main(")
    assert [json.loads(answer)["prompt"] for answer in answers.splitlines()] == [
        "def main(",
        "class Stack:",
        "for i in range(",
    ]
    assert "cpu" in devices
    assert "\ncpu: available (" in doctor
    assert left_in(tmp_path) == []


def test_the_folders_of_the_table_are_there():
    named = re.findall(r"^\| `([\w/]+)`", README, re.M)
    assert len(named) >= 10
    assert all((ROOT / folder).is_dir() for folder in named)
