"""The Jinja environment of chat templates: what transformers 5 gives them (``utils/chat_template_utils.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment, in which a template can change nothing outside its own text.

    One test differs from Jinja's: what is undefined ``is none``. A field that a client sends as null is left out of its
    message, as in transformers, and templates ask for it both ways.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.tests["none"] = lambda value: value is None or isinstance(value, Undefined)
    return environment


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant wrote, for training. Here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call of its contents, whose assignments stay inside, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's escapes for HTML, which a model would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
