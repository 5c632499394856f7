"""The chat template of a checkpoint: messages to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ApiError
from .schemas import Message


class ChatTemplate:
    """Renders a checkpoint's template in Jinja2's sandbox, with the names that transformers gives it.

    A checkpoint has it in ``chat_template.jinja``, or under ``chat_template`` in ``tokenizer_config.json``.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._template: Any = None
        config = checkpoint / "tokenizer_config.json"
        facts: dict[str, Any] = json.loads(config.read_bytes()) if config.exists() else {}
        file = checkpoint / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.exists() else facts.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((one["template"] for one in text if one.get("name") == "default"), None)
        if isinstance(text, str):
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(text)
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
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", param="messages") from error
        return text


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _text(token: object) -> str:
    return token.get("content", "") if isinstance(token, dict) else token if isinstance(token, str) else ""
