"""The chat template of a checkpoint: messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal_core import InvalidValue

from hal.model.fields import read_json
from hal.model.files import check_regular

from .errors import ApiError
from .schemas import Message


class ChatTemplate:
    """Renders a checkpoint's template in Jinja2's sandbox, with the names that transformers gives it.

    A checkpoint has it in ``chat_template.jinja``, or under ``chat_template`` in ``tokenizer_config.json``.
    """

    def __init__(self, checkpoint: Path) -> None:
        config, file = checkpoint / "tokenizer_config.json", checkpoint / "chat_template.jinja"
        facts = read_json(config) if config.exists() else {}
        if file.exists():
            self._template = _compiled(_text_of(file), file)
        else:
            self._template = _compiled(_template_in(facts, config), config)
        self._tokens = {name: _text(facts.get(name)) for name in ("bos_token", "eos_token")}

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt. Raises :class:`ApiError` without a template, and for messages that it refuses."""
        if self._template is None:
            what = "the model has no chat template"
            raise ApiError(400, f"{what} (use /v1/completions, or a checkpoint with one)", code="no_chat_template")
        from jinja2 import TemplateError

        plain = [{"role": one.role, "content": one.content} for one in messages]
        try:
            text: str = self._template.render(messages=plain, add_generation_prompt=True, tools=None, **self._tokens)
        except Exception as error:  # a template computes with what a client sends: it may raise anything
            why = f"{error}" if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ApiError(400, f"the chat template refuses the messages: {why}", param="messages") from error
        return text


def _text_of(file: Path) -> str:
    check_regular(file)
    try:
        return file.read_text(encoding="utf-8")
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


def _compiled(text: str | None, file: Path) -> Any:  # noqa: ANN401 (jinja2 is an extra)
    if text is None:
        return None
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(text)
    except Exception as error:  # noqa: BLE001 (also Python's own errors, of the code that jinja2 makes)
        where = f"line {error.lineno}" if isinstance(error, TemplateSyntaxError) else type(error).__name__
        raise InvalidValue(
            f"no chat template: {where}: {error}", cure="correct the template", argument=str(file)
        ) from None


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _text(token: object) -> str:
    return token.get("content", "") if isinstance(token, dict) else token if isinstance(token, str) else ""
