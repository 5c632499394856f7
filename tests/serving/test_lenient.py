"""What `--lenient` ignores: fields that are not offered, wherever they are; and nothing else."""

import json
import re

import msgspec
import pytest
from hal_engine.serving.bodies import read_body
from hal_engine.serving.errors import ApiError
from hal_engine.serving.schemas import Chat, Completion, Tokenize

HELLO = {"role": "user", "content": "x"}


def read(kind, body, *, lenient=True):
    return read_body(kind, json.dumps(body).encode(), lenient=lenient)


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        (Completion, {"prompt": "x", "echo": True}, "echo"),
        (
            Completion,
            {"prompt": "x", "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (Chat, {"messages": [HELLO, {**HELLO, "refusal": "no"}]}, "messages[1].refusal"),
        (Chat, {"messages": [HELLO], "tools": [{}]}, "tools"),
        (Tokenize, {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_a_field_that_is_not_offered_is_refused_or_ignored(kind, body, name):
    with pytest.raises(ApiError, match=f"^{re.escape(name)} is not offered ") as caught:
        read(kind, body, lenient=False)
    assert caught.value.param == name
    assert caught.value.message.count(name) == 1, "the field is named twice"
    read(kind, body)


def test_what_is_offered_is_kept():
    given = {"messages": [{**HELLO, "name": "me", "audio": {}}], "stream_options": {"include_usage": True, "x": [1]}}
    found = msgspec.to_builtins(read(Chat, given))
    assert {name: value for name, value in found["messages"][0].items() if value is not None} == {**HELLO, "name": "me"}
    assert found["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0]: object missing required field `content`"),
        ({"messages": {"content": "x"}}, "messages: expected `array`, got `object`"),
        ({"messages": ["x"]}, "messages[0]: expected `object`, got `str`"),
        ({"messages": [HELLO], "stream_options": [{}]}, "stream_options: expected `object | null`, got `array`"),
        ([], "the body: expected `object`, got `array` (send a JSON object)"),
    ],
)
def test_what_is_wrong_is_refused_all_the_same(body, message):
    with pytest.raises(ApiError) as caught:
        read(Chat, body)
    assert (caught.value.status, caught.value.message) == (400, message)


def test_deep_lists_are_refused():
    for depth in (900, 5000):
        with pytest.raises(ApiError):
            read_body(Chat, b'{"messages":' + b"[" * depth + b"]" * depth + b"}", lenient=True)
