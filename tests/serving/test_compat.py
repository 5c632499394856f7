"""What clients of other servers send is taken; what is not offered is refused once, with the page that says who has it
in its place."""

import json
import math
import shutil

import httpx
import pytest
from hal_core import FinishReason
from hal_engine.generation import Part
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.serving.bodies import read_body
from hal_engine.serving.errors import ApiError
from hal_engine.serving.schemas import Chat, Completion
from hal_engine.serving.shapes import ChatShape, CompletionShape
from openai import NotFoundError, OpenAI

import hal
from tests.model.tokenizers_of_kinds import byte_level, gemma, llama2

from .clients import CHAT_TEMPLATE, CLIENTS
from .conftest import HANGS, serving

pytestmark = pytest.mark.long(25)
PAGE = "docs/serving.md says what offers it"
HELLO = {"role": "user", "content": "x"}
NOTHING = {
    "echo": False,
    "best_of": 1,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "response_format": {"type": "text"},
    "store": False,
    "suffix": None,
    "user": "me",
    "metadata": {"a": "b"},
    "top_k": -1,
    "seed": -1,
    "reasoning_effort": None,
    "service_tier": "auto",
    "guided_json": None,
    "stop_token_ids": [],
}


def read(kind, body, *, lenient=False):
    return read_body(kind, json.dumps(body).encode(), lenient=lenient)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A server whose model has a chat template and a start token before raw texts."""
    model = tmp_path_factory.mktemp("chats") / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    path = model / "tokenizer.json"
    piece, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    processor = {"type": "TemplateProcessing", "single": [piece, text], "pair": [piece, text], "special_tokens": tokens}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"post_processor": processor}))
    with serving("--model", str(model), "--name", "org/chats", "--slots", "4", "--max-model-len", "256") as served:
        yield served


def post(served, route, status=200, **body):
    answer = httpx.post(f"{served.url}{route}", json=body, timeout=HANGS)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(("kind", "body"), [(Completion, {"prompt": "x"}), (Chat, {"messages": [HELLO]})])
def test_null_and_what_asks_for_nothing_is_as_if_absent(kind, body):
    plain = read(kind, body)
    optional = [name for name in kind.__struct_fields__ if name not in body]
    assert read(kind, body | dict.fromkeys(optional)) == plain
    given = read(kind, body | NOTHING)
    assert given.changed() == plain.changed() | {"top_k": 0, "eos_token_ids": []}, "-1 is each field's own word"
    for name in NOTHING.keys() & {*optional} - {"top_k", "seed", "stop_token_ids"}:
        assert getattr(given, name) == getattr(plain, name)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (Completion, {"prompt": "x", "echo": True}, "echo"),
        (Completion, {"prompt": "x", "best_of": 2}, "best_of"),
        (Completion, {"prompt": "x", "logit_bias": {"1": 5}}, "logit_bias"),
        (Completion, {"prompt": "x", "suffix": "y"}, "suffix"),
        (Completion, {"prompt": "x", "guided_regex": "a*"}, "guided_regex"),
        (Completion, {"prompt": "x", "temprature": 0, "lora_path": "x"}, "temprature"),
        (Chat, {"messages": [HELLO], "tools": [{"type": "function"}]}, "tools"),
        (Chat, {"messages": [HELLO], "response_format": {"type": "json_object"}}, "response_format"),
        (Chat, {"messages": [HELLO], "store": True}, "store"),
        (Chat, {"messages": [HELLO | {"audio": {"id": "x"}}]}, "messages[0].audio"),
    ],
)
def test_what_is_not_offered_is_refused_once(kind, body, param):
    with pytest.raises(ApiError) as caught:
        read(kind, body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.count(param) == 1
    assert (PAGE in caught.value.message) == (param != "temprature")
    read(kind, body, lenient=True)


@pytest.mark.parametrize(
    "name", ["top_a", "typical_p", "tool", "min_k", "min_length", "n_probs", "suffix", "logit_bias", "x"]
)
def test_no_field_of_another_meaning_is_offered(name):
    with pytest.raises(ApiError) as caught:
        read(Completion, {"prompt": "x", name: 0.5})
    assert "did you mean" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "field"),
    [("maxTokens", "max_tokens"), ("temprature", "temperature"), ("top-p", "top_p"), ("stops", "stop")],
)
def test_another_spelling_of_a_field_is_offered(name, field):
    with pytest.raises(ApiError, match=rf"\(did you mean {field}\?\)$"):
        read(Completion, {"prompt": "x", name: 0.5})


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0]"),
        ([{"type": "text", "text": "x", "more": 1}], "messages[0].content[0].more"),
        (5, "messages[0].content"),
    ],
)
def test_content_that_is_no_text_is_refused_by_its_place(content, param):
    with pytest.raises(ApiError) as caught:
        read(Chat, {"messages": [{"role": "user", "content": content}]})
    assert caught.value.param == param


def test_a_message_without_content_is_refused_unless_it_calls_tools():
    with pytest.raises(ApiError, match="content"):
        read(Chat, {"messages": [{"role": "assistant"}]})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"content": None}, {"content": None, "tool_calls": [call]}, {"tool_calls": [call]}):
        (found,) = read(Chat, {"messages": [{"role": "assistant", **message}]}).messages
        assert found.content is None


def test_chats_are_encoded_without_a_second_start_token(chats):
    messages = [HELLO]
    text = "<|endoftext|>user: x\nassistant:"
    raw = post(chats, "/tokenize", prompt="x")["tokens"]
    assert raw[0] == 0
    assert post(chats, "/tokenize", prompt="x", add_special_tokens=False)["tokens"] == raw[1:]
    chat = post(chats, "/tokenize", messages=messages)["tokens"]
    assert (chat[0], chat.count(0)) == (0, 1)
    assert post(chats, "/detokenize", tokens=chat) == {"prompt": text}
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = post(chats, "/v1/chat/completions", **body)
    assert answer["usage"]["prompt_tokens"] == len(chat)
    same = post(chats, "/v1/completions", prompt=text, max_tokens=4, temperature=0, add_special_tokens=False)
    assert same["choices"][0]["text"] == answer["choices"][0]["message"]["content"]
    assert post(chats, "/v1/completions", prompt="x", max_tokens=1)["usage"]["prompt_tokens"] == len(raw)
    more = post(chats, "/v1/chat/completions", **body, chat_template_kwargs={"loud": True})
    assert more["usage"]["prompt_tokens"] > len(chat)
    less = post(chats, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert len(less) < len(chat)


def test_models_by_name_and_tokens_back_to_text(chats):
    with OpenAI(base_url=f"{chats.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("org/chats").id == "org/chats"
        with pytest.raises(NotFoundError, match="there is no model 'other'"):
            client.models.retrieve("other")
    for body, param in (
        ({"tokens": [1] * 300}, "tokens"),
        ({"tokens": [99999]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": ["x"]}, "tokens[0]"),
    ):
        assert post(chats, "/detokenize", 400, **body)["error"]["param"] == param
    assert post(chats, "/detokenize", tokens=[]) == {"prompt": ""}
    for body in ({}, {"prompt": "x", "messages": [HELLO]}):
        assert post(chats, "/tokenize", 400, **body)["error"]["param"] == "prompt"
    assert post(chats, "/tokenize", 404, prompt="x", model="other")["error"]["param"] == "model"
    error = post(chats, "/v1/embeddings", 404, input="x")["error"]["message"]
    assert "docs/serving.md says what offers others" in error
    assert "/v1/models/{model}, " in error


def test_stops_end_an_answer_that_ignores_end_tokens(server):
    body = {"prompt": "def main(", "max_tokens": 20, "temperature": 0}
    text = hal.generate("def main(", device="cpu", max_tokens=20, temperature=0.0)
    found = post(server, "/v1/completions", **body, ignore_eos=True, stop=text[5:8])["choices"][0]
    assert (found["text"], found["finish_reason"]) == (text.partition(text[5:8])[0], "stop")
    tokens = post(server, "/v1/completions", **body, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    (last,) = post(server, "/tokenize", prompt=tokens[5])["tokens"]
    found = post(server, "/v1/completions", **body, ignore_eos=True, stop_token_ids=[last], logprobs=0)["choices"][0]
    assert found["logprobs"]["tokens"] == tokens[: tokens.index(tokens[5]) + 1]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("make", [byte_level, llama2, gemma])
def test_no_token_of_a_log_probability_is_lost(make):
    backend = make()
    tokenizer = Tokenizer(backend, read_config(DEFAULT_CHECKPOINT))
    every = tuple((token, -float(token)) for token in range(tokenizer.vocab_size + 3))
    for sampled in every:
        part = Part("", (sampled[0],), FinishReason.LENGTH, False, ((sampled, *every),))
        found = CompletionShape("x", tokenizer, logprobs=True).choice(0, [part])["logprobs"]
        assert [*found["top_logprobs"][0].values()] == [value for _, value in every]
        (best,) = ChatShape("x", tokenizer, logprobs=True).choice(0, [part])["logprobs"]["content"]
        assert best["token"] in found["top_logprobs"][0]
        assert found["tokens"] == [best["token"]]
        own = tokenizer.bytes_of(sampled[0])
        assert best["bytes"] == (None if own is None else [*own])


def test_names_of_tokens_are_openais():
    backend = llama2()
    shape = CompletionShape("x", Tokenizer(backend, read_config(DEFAULT_CHECKPOINT)), logprobs=True)
    ids = [backend.token_to_id(text) for text in ("<0xE2>", "▁a", "<s>", "中")]
    names = [shape.name_of(token) for token in [*ids, 100_000]]
    assert names == [r"bytes:\xe2", " a", "<s>", "中", "token_id:100000"]
    pairs = tuple(((token, -1.0),) for token in [backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()])
    part = Part("é a", (), FinishReason.LENGTH, False, (*pairs, ((ids[1], -math.inf),), ((ids[2], -1.0),)))
    found = shape.choice(0, [part])["logprobs"]
    assert found["text_offset"] == [0, 1, 1, 3], "offsets count characters of the text"
    assert found["token_logprobs"][2] == -9999.0


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_take_every_answer(chats, name):
    check, package = CLIENTS[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    check(chats.url, "org/chats")
