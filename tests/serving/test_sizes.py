"""How much a body may hold, how much of it an error repeats, and large answers piece by piece."""

import asyncio
import json
import threading
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import pytest
from hal_engine.generation.plan import ModelPlan
from hal_engine.serving import Drain, Server, Settings, sizes
from hal_engine.serving.bodies import read_body
from hal_engine.serving.errors import ApiError, error_object
from hal_engine.serving.schemas import Chat, Completion
from hal_engine.serving.sizes import OBJECTS, VALUES, InPieces, check_size, encoded
from hypothesis import given
from hypothesis import strategies as st

from .test_fuzz import VALUES as JSON

SIGNS = st.text('a"\\,[{:é', max_size=20)


def counted(found):
    """Lists, objects and fields of a value; and commas."""
    inner = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []
    own = (
        (1 + len(inner) * isinstance(found, dict), max(0, len(inner) - 1)) if isinstance(found, list | dict) else (0, 0)
    )
    return tuple(map(sum, zip(own, *map(counted, inner), strict=True)))


@given(st.recursive(SIGNS | st.none(), lambda one: st.lists(one) | st.dictionaries(SIGNS, one)), st.integers(1, 9))
def test_what_texts_contain_does_not_count(found, piece):
    data = json.dumps(found, ensure_ascii=False).encode()
    objects, commas = counted(found)
    with patch.object(sizes, "_PIECE", piece):
        pieces = list(sizes._outside_texts(data))
    assert tuple(map(sum, zip((0, 0), *map(sizes._counted, pieces), strict=True))) == (objects, objects + commas)


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b'{"prompt":[' + b"1," * (VALUES - 3) + b"1]}", True),
        (b'{"prompt":[' + b"1," * VALUES + b"1]}", False),
        (b'{"prompt":[' + b"[]," * (OBJECTS - 4) + b"[]]}", True),
        (b'{"prompt":[' + b"[]," * OBJECTS + b"[]]}", False),
        (b'{"metadata":{' + b'"a":1,' * OBJECTS + b'"a":1}}', False),
        (b'{"prompt":"' + b',[{:\\"' * VALUES + b'"}', True),
    ],
)
def test_a_body_has_so_many_values(body, is_taken):
    if is_taken:
        check_size(body)
    else:
        with pytest.raises(ApiError, match=r"more than 32768 lists, objects and fields, or more than 262144 values"):
            check_size(body)


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("route", "body", "status", "threads"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * 110_000}, 413, []),
        ("/v1/completions", {"prompt": [1] * 300_000}, 413, []),
        ("/v1/chat/completions", {"messages": [MESSAGE] * 4000}, 503, ["hal-bodies"]),
        ("/v1/chat/completions", {"messages": [MESSAGE]}, 503, []),
    ],
)
def test_a_large_body_is_read_apart_from_the_loop_and_too_large_a_one_is_not(monkeypatch, route, body, status, threads):
    """The engine has not been opened: what could be read ends there."""
    found = []

    def read(kind, data, *, lenient):
        if threading.current_thread() is not threading.main_thread():
            found.append(threading.current_thread().name.partition("_")[0])
        return read_body(kind, data, lenient=lenient)

    monkeypatch.setattr("hal_engine.serving.app.read_body", read)

    async def ask():
        engine = SimpleNamespace(plan=ModelPlan(None), error=None, max_model_len=512)
        transport = httpx.ASGITransport(Server(engine, Settings(model="x")).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post(route, json=body)).status_code

    assert (asyncio.run(ask()), found) == (status, threads)


def test_a_template_renders_apart_from_the_loop(with_template):
    found = []

    async def ask():
        engine = SimpleNamespace(plan=ModelPlan(with_template), error=None, max_model_len=512, room=None)
        server = Server(engine, Settings(model="x"), drain=Drain(1.0))
        server._opened.set()

        def render(*_, **__):
            found.append(threading.current_thread().name.partition("_")[0])
            raise ApiError(400, "no chat")

        server.template.render = render
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/v1/chat/completions", json={"messages": [MESSAGE]})).status_code

    assert (asyncio.run(ask()), found) == (400, ["hal-bodies"])


def test_a_model_with_a_longer_context_takes_longer_prompts_of_ids():
    check_size(b'{"prompt":[' + b"1," * VALUES + b"1]}", longest=2 * VALUES)


def test_a_chat_has_so_many_messages():
    message = {"role": "user", "content": ""}
    read_body(Chat, json.dumps({"messages": [message] * 4096}).encode(), lenient=False)
    with pytest.raises(ApiError, match="messages: expected `array` of length <= 4096"):
        read_body(Chat, json.dumps({"messages": [message] * 4097}).encode(), lenient=False)


def test_a_giant_name_is_not_compared_and_not_sent_back():
    with pytest.raises(ApiError) as caught:
        read_body(Completion, json.dumps({"prompt": "x", "a" * (4 << 20): 1}).encode(), lenient=False)
    assert len(error_object(caught.value)) < 500


def test_an_error_repeats_little_of_what_a_client_sent():
    assert len(error_object(ApiError(400, "a" * (4 << 20)))) < 1200


@given(JSON)
def test_json_in_pieces_is_json(found):
    assert json.loads(encoded(found)) == found


@pytest.mark.parametrize("size", [0, 1, sizes._PIECE, sizes._PIECE + 1, 3 * sizes._PIECE])
def test_a_large_answer_is_sent_piece_by_piece(size):
    sent, data = [], bytes(number % 251 for number in range(size))

    async def send(message):
        sent.append(message)

    asyncio.run(InPieces(data)({}, None, send))
    start, *pieces = sent
    assert dict(start["headers"])[b"content-length"] == b"%d" % size
    assert b"".join(one["body"] for one in pieces) == data
    assert all(len(one["body"]) <= sizes._PIECE for one in pieces)
    assert [one["more_body"] for one in pieces] == [True] * (len(pieces) - 1) + [False]
