"""A checkpoint's chat template: what is wrong with its files turns chats off and is named by its path, and what it
raises is an error of 400."""

import json
import shutil

import httpx
import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.serving.chat import ChatTemplate
from hal_engine.serving.errors import ApiError
from hal_engine.serving.messages import Message

from .conftest import HANGS, serving

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
HELLO = [Message("user", "hello"), Message("user", "again")]


def deep(count):
    return "{% for x in [1] %}" * count + "{% endfor %}" * count


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, b"{bad", "cannot be read: "),
        (CONFIG, b'{"a": "\xff\xfe"}', "cannot be read: "),
        (CONFIG, b"[]", "is not a JSON object"),
        (CONFIG, b"[" * 200_000, "cannot be read: "),
        (CONFIG, b'{"chat_template": 5}', "chat_template is no text"),
        (CONFIG, b'{"chat_template": ["x"]}', "chat_template is no text"),
        (CONFIG, b'{"chat_template": [{"name": "default"}]}', "chat_template is no text"),
        (CONFIG, b'{"chat_template": "{% for %}"}', "no chat template: line 1: "),
        (TEMPLATE, b"\xff", "is no UTF-8 text: "),
        (TEMPLATE, b"\n{{ messages", "no chat template: line 2: "),
        (TEMPLATE, b"{{ x | no_such_filter }}", "no chat template: line 1: No filter named 'no_such_filter'"),
        (TEMPLATE, deep(30).encode(), "no chat template: "),
        (TEMPLATE, b"{{ " + b"(" * 20_000, "no chat template: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    found = ChatTemplate(tmp_path)
    assert found.fault.startswith(f"{tmp_path / name}: {message}")
    assert found.fault.endswith(")"), "it has no cure"
    with pytest.raises(ApiError, match="the model's chat template cannot be read") as caught:
        found.render(HELLO)
    assert (caught.value.status, caught.value.code) == (400, "no_chat_template")
    assert str(tmp_path) not in caught.value.message, "clients are told where files are"


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    for name in (TEMPLATE, CONFIG):
        (tmp_path / name).mkdir()
        assert f"{name}: is not a regular file" in ChatTemplate(tmp_path).fault
        (tmp_path / name).rmdir()


@pytest.mark.parametrize("text", [None, [], [{"name": "tool_use", "template": "x"}]])
def test_a_checkpoint_may_have_no_template(tmp_path, text):
    (tmp_path / CONFIG).write_text(json.dumps({"chat_template": text}))
    with pytest.raises(ApiError, match="the model has no chat template"):
        ChatTemplate(tmp_path).render(HELLO)


@pytest.mark.parametrize("word", ["break", "continue"])
def test_loops_may_be_left_as_with_transformers(tmp_path, word):
    text = "{% for one in messages %}{{ one.content }}{% " + word + " %}!{% endfor %}"
    (tmp_path / TEMPLATE).write_text(text)
    assert ChatTemplate(tmp_path).render(HELLO) == ("hello" if word == "break" else "helloagain")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ '{x}'.format() }}", "KeyError: 'x'"),
        ("{{ 1 + 'x' }}", "TypeError: "),
        ("{{ messages[9].content.x }}", "list object has no element 9"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
    ],
)
def test_what_a_template_raises_refuses_the_messages(tmp_path, text, message):
    (tmp_path / TEMPLATE).write_text(text)
    with pytest.raises(ApiError) as caught:
        ChatTemplate(tmp_path).render(HELLO)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.message.startswith(f"the chat template refuses the messages: {message}")


def test_a_server_of_such_a_checkpoint_says_so_and_completes_texts(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, model)
    (model / TEMPLATE).write_text("{% for %}")
    lines = []
    with serving("--model", str(model), until_loaded=False, lines=lines) as served:
        (line,) = lines
        assert line.startswith(f"hal: /v1/chat/completions is off: {model / TEMPLATE}: no chat template: line 1: ")
        served.wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "the engine did not load")
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=HANGS)
        assert answer.status_code == 200, answer.text
