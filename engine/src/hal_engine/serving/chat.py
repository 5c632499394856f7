"""The chat template of a checkpoint: messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hal_core import InvalidValue
from jinja2 import Template, TemplateError, TemplateSyntaxError

from hal_engine.model.fields import read_json
from hal_engine.model.files import check_regular, read_file

from .environment import template_environment
from .errors import ApiError
from .messages import Message, as_template_sees

_FILE, _CONFIG, _TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that ``chat_template_kwargs`` cannot set."""


class ChatTemplate:
    """Renders a checkpoint's template in Jinja2's sandbox, with the names that transformers gives it.

    A checkpoint has it in ``chat_template.jinja``, or under ``chat_template`` in ``tokenizer_config.json``. One that
    cannot be read or compiled refuses all messages; ``fault`` says why.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.fault = ""
        self._template: Template | None = None
        self._missing = "the model has no chat template (use /v1/completions, or a checkpoint with one)"
        self._tokens: dict[str, str] = {}
        try:
            facts = _facts(checkpoint / _CONFIG)
            if (file := checkpoint / _FILE).exists():
                self._template = _compiled(_text_of(file), file)
            elif (text := _template_in(facts, checkpoint / _CONFIG)) is not None:
                self._template = _compiled(text, checkpoint / _CONFIG)
            given = _facts(checkpoint / _TOKENS) | facts
            self._tokens = {name: text for name in _NAMES if (text := _text(given.get(name))) is not None}
        except InvalidValue as error:
            self._template = None
            self._missing = "the model's chat template cannot be read (use /v1/completions; the server's log says why)"
            self.fault = str(error)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt, to be encoded without further special tokens. ``variables``: further ones of the template.

        Raises :class:`ApiError` without a template, and for messages that it refuses.
        """
        if self._template is None:
            raise ApiError(400, self._missing, code="no_chat_template")
        given = variables or {}
        if own := [name for name in OWN if name in given]:
            what = f"chat_template_kwargs: {own[0]} is the request's own (leave it out)"
            raise ApiError(400, what, param="chat_template_kwargs")
        plain = [as_template_sees(message, f"messages[{number}]") for number, message in enumerate(messages)]
        context = {**self._tokens, **given, "messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context, tools=None, documents=None)
        except Exception as error:  # a template computes with what a client sends: it may raise anything
            why = f"{error}" if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ApiError(400, f"the chat template refuses the messages: {why}", param="messages") from error


def _facts(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _text_of(file: Path) -> str:
    check_regular(file)
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"is no UTF-8 text: {error}", cure="restore the file", argument=str(file)) from None


def _template_in(facts: dict[str, Any], config: Path) -> str | None:
    """Return the template in ``tokenizer_config.json``, of several by name the default one; None without one."""
    found = facts.get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = next((one.get("template", 0) for one in found if one.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise InvalidValue("chat_template is no text", cure="restore the file", argument=str(config))
    return found


def _compiled(text: str, file: Path) -> Template:
    try:
        return template_environment().from_string(text)
    except Exception as error:  # noqa: BLE001 (also Python's own errors, of the code that jinja2 makes)
        where = f"line {error.lineno}" if isinstance(error, TemplateSyntaxError) else type(error).__name__
        raise InvalidValue(
            f"no chat template: {where}: {error}", cure="correct the template", argument=str(file)
        ) from None


def _text(token: object) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
