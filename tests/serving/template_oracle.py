"""transformers as the judge of chat templates. The templates of ``templates/`` are our own, in the style of models.

PYTHONPATH=. python tests/serving/template_oracle.py     writes templates/expected.json; needs transformers and jinja2
"""

import copy
import json
import tempfile
from pathlib import Path

from tests.model.tokenizers_of_kinds import byte_level

HERE = Path(__file__).with_name("templates")
EXPECTED = HERE / "expected.json"
STYLES = sorted(file.stem for file in HERE.glob("*.jinja"))
PRINTS = {"deepseek"}
"""Styles that print a call's arguments as they come, where others walk them."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
ASKED = {"role": "user", "content": "What's 2 < 3 & é?"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {
        "name": "compare",
        "arguments": '{"left": "<b>2</b>", "right": 3.5, "more": ["é", null, {"x": true}]}',
    },
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"less": true}'}
CHATS = {
    "a question": [ASKED],
    "a system prompt": [{"role": "system", "content": " Be brief.\n"}, ASKED],
    "two turns": [ASKED, {"role": "assistant", "content": " Yes. "}, {"role": "user", "content": "Sure?\n"}],
    "a tool's result": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "a call without text": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "a tool's history": [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And 3 < 2?"},
    ],
    "a thought": [
        ASKED,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "2 is less.\n"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "tool_calls": [CALL]},
        RESULT,
    ],
    "a name": [{**ASKED, "name": "me"}, {"role": "assistant", "content": "Yes.", "name": "it"}, ASKED],
    "a role too many": [ASKED, ASKED],
}
VARIABLES = {
    "": {},
    ", thinking": {"enable_thinking": True, "thinking": True},
    ", not thinking": {"enable_thinking": False, "thinking": False},
}
CASES = {
    f"{style}: {chat}{how}": (style, chat, VARIABLES[how])
    for style in STYLES
    for chat in CHATS
    for how in VARIABLES
    if not how or chat in ("a question", "a thought")
}
DATE = {"date_string": "29 Nov 2026"}
REFUSED = "refused"
"""What stands for a chat that a template refuses."""


def checkpoint(folder, style):
    """Write the files of a tokenizer with this template, which puts a start token before a text by itself."""
    backend = byte_level(bos=True)
    backend.add_special_tokens([*TOKENS.values()])
    backend.save(str(folder / "tokenizer.json"))
    facts = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_bytes((HERE / f"{style}.jinja").read_bytes())


def judged(case):
    """Return what transformers makes of a case: the text and its tokens."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    style, chat, variables = case
    messages = copy.deepcopy(CHATS[chat])
    for message in messages:
        for call in message.get("tool_calls", ()):
            if style not in PRINTS:  # transformers leaves it to its caller to give what the template takes
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if style in PRINTS and message["content"] is None:  # of which these ask, and which transformers leaves out
            message["content"] = ""
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name), style)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    given = {"add_generation_prompt": True, **DATE, **variables}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
    except TemplateError:
        return {"text": REFUSED, "tokens": []}
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **given)
    return {"text": text, "tokens": list(found["input_ids"])}


def main():
    import jinja2
    import transformers

    made = f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    found = {"made by": made, "cases": {name: judged(case) for name, case in CASES.items()}}
    EXPECTED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(CASES)} cases, {made}")


if __name__ == "__main__":
    main()
