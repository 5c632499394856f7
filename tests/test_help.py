"""The help of the commands: short, in groups, and as wide as the terminal."""

import io
import re
import subprocess
import sys

import pytest
from hal_engine.cli.run_output import progress_line

from hal.cli import console, main
from hal.cli.tree import COMMANDS

from .commands import Terminal

PAGE = """\
usage: hal run [OPTIONS] [PROMPT]...

Generate text with a model: the small one that ships, or a
Llama-, Mistral-, Qwen2- or Qwen3-style checkpoint.

A pipe or a file on standard input is read for prompts, one
a line, where no other is given.

  PROMPT...  A text to continue; -: standard input, one a
             line.

Options:
  --prompts FILE   A file with one prompt a line.
                   FILE.jsonl: an object a line (prompt,
                   sampling parameters).
  --model MODEL    A folder with a checkpoint, or ORG/NAME
                   of the Hugging Face cache; without it,
                   the small model that ships.
  --device NAME    The device: a name that hal devices
                   lists, or NAME:INDEX.
  --max-tokens N   Most tokens to generate for each prompt.
                   (default: 64)
  --temperature X  Higher: more varied. 0: always the best
                   token. (default: 0.7)
  --top-p X        Draw from the best tokens that make up X
                   of the probability. (default: 0.9)
  --seed N         Draws depend on it, the prompt's number
                   and the position. (default: 0)
  --json           Print one JSON object a prompt, in their
                   order.
  -q, --quiet      Print the text alone, and errors.
  -v, --verbose    Show choices, fallbacks and tracebacks.
  --help-all       Show all options and exit.
  -h, --help       Show this message and exit.
"""


@pytest.fixture
def page(command, monkeypatch):
    """The help that a command prints in a terminal of so many columns."""

    def printed(columns, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = command(*arguments)
        assert (done.status, done.err) == (0, "")
        return done.out

    return printed


def test_the_short_help_of_hal_run(page):
    assert page(60, "run", "--help") == PAGE


def test_the_short_help_has_a_dozen_options_the_long_one_all(page):
    short, long = page(80, "run", "-h"), page(80, "run", "--help-all")
    assert len(re.findall(r"^  -", short, re.M)) <= 12
    assert len(re.findall(r"^  -", long, re.M)) > 40
    groups = ["Prompt", "Sampling", "Output", "Scheduling", "Speculation", "Ranks", "Split"]
    assert re.findall(r"^(\w+) options:$", long, re.M) == groups
    assert "Device and runner options:" in long
    assert not set("<>") & set(long)
    assert set(re.findall(r"^  (--[\w-]+)", long, re.M)) > {
        "--prompt",
        "--record",
        "--top-k",
        "--sink",
        "--slots",
        "--tp",
        "--split",
    }


@pytest.mark.parametrize("columns", [28, 60, 80, 120])
@pytest.mark.parametrize("arguments", [(), *((name,) for name in COMMANDS if name != "conform"), ("run", "--help-all")])
def test_no_line_is_wider_than_the_terminal(page, columns, arguments):
    text = page(columns, *arguments, *["-h"] * ("--help-all" not in arguments))
    assert max(map(len, text.splitlines())) <= columns
    if columns <= 80 and arguments in (("run",), ("run", "--help-all")):
        assert max(map(len, text.splitlines())) > columns - 6, "the width is used"
    assert not re.search(r"\(default:$", text, re.M), "a default is on the line below its word"
    assert text.isascii()


@pytest.mark.parametrize("columns", [28, 60, 80, 120])
def test_a_long_line_breaks_between_words_on_a_terminal_alone(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    line = "hal: error: --device: no device 'gpu'; installed: cpu, cuda (name one of those, or install the plugin)"
    text = console.fitted(f"Traceback\n{line}", Terminal())
    assert text.replace("\n", " ") == f"Traceback {line}"
    assert max(map(len, text.splitlines())) <= columns
    assert console.fitted(line, io.StringIO()) == line


def test_a_report_is_wrapped_between_words_and_keeps_its_indents(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    text = "cpu: available\n  a reason of many words, and its cure\n\nno findings"
    fitted = console.fitted(text, Terminal(), every=True)
    assert fitted == "cpu: available\n  a reason of many\n  words, and its cure\n\nno findings"
    assert console.fitted("word " * 9, Terminal()) == "word " * 9, "only hal's own lines"


def test_the_status_goes_when_anything_else_is_printed_and_is_in_no_pipe(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "quiet", False)
    for stream, written in (
        (Terminal(), "\rloading Paddle\x1b[K\r\x1b[Khal: a note\n"),
        (io.StringIO(), "hal: a note\n"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        console.status("loading Paddle")
        console.say("hal: a note")
        console.status("")
        assert stream.getvalue() == written
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(console, "quiet", True)
    console.status("loading Paddle")
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("columns", [20, 28, 60, 120])
def test_the_progress_bar_fits_and_is_left_out_where_it_has_no_room(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    line = progress_line(120, 10, 40)
    assert line.endswith("10 of 40 prompts, 120 tokens")
    assert ("[" in line) == (columns >= 60)
    if columns >= 60:
        assert len(line) <= columns
        bar = line[1 : line.index("]")]
        assert bar.count("#") == len(bar) // 4
    assert progress_line(120, 0, 1) == "120 tokens"


@pytest.mark.parametrize("name", [(), ("run",), ("devices",), ("tail",), ("conform",)])
def test_h_and_help_are_the_same_page(command, name):
    done = command(*name, "-h")
    assert done == command(*name, "--help")
    assert (done.status, done.err) == (0, "")
    assert " ".join(["usage: hal", *name]) in done.out


def test_the_help_imports_nothing_that_only_commands_need():
    """`importlib.metadata` alone, with `email`, takes a third of the time of the rest."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from hal.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "usage: hal" in done.stdout
    imported = {*done.stderr.split()}
    assert "hal.cli.tree" in imported
    unwanted = "importlib.metadata email logging asyncio rich pydantic packaging stevedore numpy msgspec socket paddle"
    assert not imported & {*unwanted.split(), "hal_core.errors", "hal.discovery", "hal.contract"}


def test_the_command_tree_is_imported_without_garbage_collection():
    code = (
        "import atexit, gc; atexit.register(lambda: print('frozen:', gc.get_freeze_count()))\n"
        "from hal.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout.rpartition("frozen: ")[2]) > 1000


def test_a_command_of_another_distribution_is_found_by_its_name(capsys):
    with pytest.raises(SystemExit):
        main(["vllm", "-h"])
    assert capsys.readouterr().out.startswith("usage: hal vllm [OPTIONS] check")
