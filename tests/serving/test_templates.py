"""Chat templates in the style of models give the text and the tokens that transformers gives, also where a call's
arguments are a client's text."""

import importlib.util
import json
import shutil
from datetime import datetime

import msgspec
import pytest
from hal_engine.generation.plan import ModelPlan
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.serving import environment
from hal_engine.serving.chat import ChatTemplate
from hal_engine.serving.errors import ApiError
from hal_engine.serving.messages import Message
from tokenizers import Tokenizer as Backend

from .template_oracle import ASKED, CALL, CASES, CHATS, DATE, EXPECTED, REFUSED, STYLES, TOKENS, checkpoint, judged

RECORDED = json.loads(EXPECTED.read_text(encoding="utf-8"))["cases"]
HERE = importlib.util.find_spec("transformers") is not None


def messages(chat):
    return msgspec.convert([{"content": None, **message} for message in chat], list[Message])


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    found = {}
    for style in STYLES:
        folder = tmp_path_factory.mktemp(style)
        checkpoint(folder, style)
        found[style] = ChatTemplate(folder), Backend.from_file(str(folder / "tokenizer.json"))
    return found


def ours(templates, case):
    style, chat, variables = case
    template, backend = templates[style]
    try:
        text = template.render(messages(CHATS[chat]), {**DATE, **variables})
    except ApiError:
        return {"text": REFUSED, "tokens": []}
    return {"text": text, "tokens": backend.encode(text, add_special_tokens=False).ids}


@pytest.mark.parametrize("name", CASES)
def test_a_chat_is_what_transformers_made_of_it(templates, name):
    assert ours(templates, CASES[name]) == RECORDED[name]


@pytest.mark.skipif(not HERE, reason="transformers is not installed")
@pytest.mark.parametrize("name", CASES)
def test_a_chat_is_what_transformers_makes_of_it_here(templates, name):
    assert ours(templates, CASES[name]) == judged(CASES[name])


def test_the_record_has_every_case_and_few_refusals():
    assert RECORDED.keys() == CASES.keys()
    refused = {name for name, found in RECORDED.items() if found["text"] == REFUSED}
    assert {name for name in refused if "a role too many" in name} == {
        "gemma: a role too many",
        "mistral: a role too many",
    }
    assert len(refused) < len(CASES) / 8


def written(folder, text, **facts):
    (folder / "chat_template.jinja").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return ChatTemplate(folder)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{{ x | tojson }}", '{"b": "<é\'&>", "a": [1, null]}'),
        ("{{ x | tojson(indent=1) }}", '{\n "b": "<é\'&>",\n "a": [\n  1,\n  null\n ]\n}'),
        ("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":[1,null],"b":"<é\'&>"}'),
        ("{{ x | tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9\'&>", "a": [1, null]}'),
        ("{% set y = 1 %}{% generation %}{% set y = 2 %}({{ y }}){% endgeneration %}{{ y }}", "(2)1"),
        ("{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ cls_token is defined }}", "<s><unk></s>False"),
        ("{{ messages[0].tool_calls is none }} {{ none is none }} {{ '' is none }}", "True True False"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Nov 2026"),
    ],
)
def test_a_template_has_what_transformers_gives_it(tmp_path, monkeypatch, text, wanted):
    class Clock(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 11, 29)

    monkeypatch.setattr(environment, "datetime", Clock)
    template = written(tmp_path, text, **TOKENS)
    variables = {"x": {"b": "<é'&>", "a": [1, None]}}
    assert template.render(messages([ASKED]), variables) == wanted


def test_special_tokens_may_stand_in_their_own_file(tmp_path):
    tokens = {"unk_token": {"content": "<u>"}, "bos_token": "<other>", "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    template = written(
        tmp_path, "{{ bos_token }}{{ unk_token }}{{ pad_token is defined }}", bos_token={"content": "<b>"}
    )
    assert template.render(messages([ASKED])) == "<b><u>False"


def test_a_calls_arguments_are_an_object_and_the_clients_own_text(tmp_path):
    text = (
        "{% set call = messages[1].tool_calls[0].function.arguments %}{{ call.right }} {{ call is mapping }} "
        "{{ call }}|{{ 'a' + call + 'b' }}|{{ 'a' ~ call }}"
    )
    found = written(tmp_path, text).render(messages(CHATS["a tool's result"]))
    own = CALL["function"]["arguments"]
    assert found == f"3.5 True {own}|a{own}b|a{own}"


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "\ud800"])
def test_arguments_that_are_no_object_are_refused_by_their_place(tmp_path, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    chat = messages([ASKED, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(ApiError) as caught:
        written(tmp_path, "x").render(chat)
    assert (caught.value.status, caught.value.param) == (400, "messages[1].tool_calls[0].function.arguments")


def test_parts_are_one_text_and_names_reach_the_template(tmp_path):
    template = written(tmp_path, "{% for one in messages %}{{ one.name }}: {{ one.content }};{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts, "name": "me"}, {"role": "assistant", "content": None}]
    assert template.render(messages(chat)) == "me: a\nb;: ;"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_of_the_request_itself_cannot_be_set(tmp_path, name):
    with pytest.raises(ApiError, match=f"chat_template_kwargs: {name} is the request's own"):
        written(tmp_path, "x").render(messages([ASKED]), {name: 1})


def test_the_tokenizers_own_special_tokens_are_for_raw_texts(tmp_path):
    shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    facts = json.loads(path.read_bytes())
    start = facts["added_tokens"][0]
    piece = {"SpecialToken": {"id": start["content"], "type_id": 0}}
    facts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            start["content"]: {"id": start["content"], "ids": [start["id"]], "tokens": [start["content"]]}
        },
    }
    path.write_text(json.dumps(facts))
    plan = ModelPlan(tmp_path / "model")
    raw, rendered = plan.tokenizer.encode("x = 1"), plan.tokenizer.encode("x = 1", add_special_tokens=False)
    assert raw == [start["id"], *rendered]
    text = start["content"] + "x = 1"
    assert plan.tokenizer.encode(text, add_special_tokens=False) == raw, "a template's own start token is one"
