"""Prompts of ``hal run``: arguments, files of text and of objects, standard input; each mistake named by its line."""

import io
import json
import sys

import pytest
from hal_core import InvalidValue
from hal_engine.cli.run_options import Output, Sampling
from hal_engine.cli.run_plan import make_plan, read_prompts
from hal_engine.model.hub import find_checkpoint
from hal_engine.options import EngineOptions

USUAL = Sampling()


class Pipe:
    """A standard input."""

    def __init__(self, data, terminal=False):
        self.buffer, self.isatty = io.BytesIO(data), lambda: terminal


@pytest.fixture
def piped(monkeypatch):
    return lambda data, **options: monkeypatch.setattr(sys, "stdin", Pipe(data, **options))


def texts(found):
    return [prompt.text for prompt in found.prompts]


def test_arguments_options_and_a_file_come_in_this_order(tmp_path, piped):
    piped(b"unread\n")
    (tmp_path / "texts").write_text("three\n\n  \r\nfour\r\n")
    found = read_prompts(["one"], ["two"], tmp_path / "texts", USUAL)
    assert texts(found) == ["one", "two", "three", "four"]
    assert (found.skipped, found.notes) == (2, ["2 empty lines skipped"])


def test_a_dash_is_standard_input_where_it_stands(piped):
    piped(b"two\n\nthree\n")
    found = read_prompts(["one", "-", "four"], [], None, USUAL)
    assert (texts(found), found.skipped) == (["one", "two", "three", "four"], 1)


def test_a_pipe_is_read_where_nothing_else_is_given_and_a_terminal_is_not(piped):
    piped("\ufeffdef f(\nclass Naïve:".encode())
    assert texts(read_prompts([], [], None, USUAL)) == ["def f(", "class Naïve:"]
    piped(b"unread", terminal=True)
    with pytest.raises(InvalidValue, match=r'^PROMPT: there is none \(give one: hal run "def main\(", --prompts FILE'):
        read_prompts([], [], None, USUAL)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "standard input is empty"), (b"\n \n", "empty lines alone"), (b"\xff", "is no UTF-8 text")],
)
def test_a_pipe_without_a_prompt_is_refused(piped, data, message):
    piped(data)
    with pytest.raises(InvalidValue, match=rf"^PROMPT: .*{message}"):
        read_prompts([], [], None, USUAL)


def test_a_line_of_objects_has_its_own_sampling(tmp_path):
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0, "max_tokens": 3, "stop": "x"},
        {"prompt": "c", "seed": 9},
    ]
    file = tmp_path / "all.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_prompts([], [], file, Sampling(max_tokens=7, stop=("y",)))
    assert (texts(found), found.skipped) == (["a", "b", "c"], 2)
    given = [(one.sampling.temperature, one.sampling.max_tokens, one.sampling.stop) for one in found.prompts]
    assert given == [(0.7, 7, ("y",)), (0, 3, ("x",)), (0.7, 7, ("y",))]
    assert [one.sampling.seed for one in found.prompts] == [0, 0, 9]
    plan = make_plan(found.prompts, EngineOptions())
    assert [request.params.max_tokens for request in plan.requests] == [7, 3, 7]
    assert (plan.requests[1].params.top_p, plan.requests[0].params.top_p) == (1.0, 0.9)
    assert plan.stops == {"r0": ("y",), "r1": ("x",), "r2": ("y",)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "temprature": 1}', "unknown key 'temprature' (did you mean 'temperature'?)"),
        ('{"prompt": "x", "words": 1}', "unknown key 'words' (temperature, top_k, "),
        ('{"prompt": "x", "top_p": 2}', "top_p: 2 (give a number from 0.0 to 1.0)"),
        ('{"prompt": "x", "top_p": 2, "temperature": 0}', "top_p: 2 (give a number from 0.0 to 1.0)"),
        ('{"prompt": "x", "max_tokens": "5"}', "max_tokens: '5' (give a whole number"),
        ('{"prompt": "x", "stop": 3}', "stop = 3 (give a text or a list of texts)"),
        ('{"prompt": "x", "stop": [""]}', "stop: an empty text"),
        ('{"text": "x"}', 'no object with a prompt, which is a text (write {"prompt": "def main("})'),
        ('{"prompt": ""}', "no object with a prompt"),
        ("[1]", "no object with a prompt"),
        ("{", "no JSON: "),
        ("[" * 200_000, "no JSON: "),
    ],
)
def test_a_bad_object_is_refused_by_line_and_name(tmp_path, line, message):
    file = tmp_path / "all.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(InvalidValue) as caught:
        read_prompts([], [], file, USUAL)
    assert str(caught.value).startswith(f"--prompts: all.jsonl line 3: {message}")


def test_log_probabilities_that_only_an_object_asks_for_need_json_too():
    asks = [Sampling(), Sampling(logprobs=1)]
    Output(as_json=True).check_shown(asks)
    with pytest.raises(InvalidValue, match=r"^--logprobs: text does not show them"):
        Output().check_shown(asks)


def test_an_existing_folder_goes_before_the_cache(tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("org/name") == cached
    with pytest.raises(InvalidValue, match=r"^--model: .*\(fetch it: hf download org/other\)$"):
        find_checkpoint("org/other")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_checkpoint("org/name").resolve() == tmp_path / "org" / "name"
