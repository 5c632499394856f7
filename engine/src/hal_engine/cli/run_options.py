"""Options of ``hal run`` beside the engine's: how tokens are chosen, and what is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from hal_core import PARAMS, InvalidValue, SamplingParams

from hal_engine.model.stops import checked_stops
from hal_engine.options import option, typed_name

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys


_USUAL = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9}
"""Defaults of the command: greedy, so small a model as the one that ships repeats itself."""


def _numbers() -> list[tuple[str, Any, Any]]:
    """Return the fields of the sampling parameters that are one number, as options: name, type and default."""
    made = []
    for one in PARAMS:
        first = one.name in (*_USUAL, "seed")
        described = option(one.help, "N" if one.integer else "X", panel="" if first else "sampling")
        kind = int if one.integer else float
        made.append((one.name, Annotated[kind, described], _USUAL.get(one.name, one.off)))
    return made


if TYPE_CHECKING:  # no type checker follows what is made of rows
    _Numbers = msgspec.Struct
else:
    _Numbers = msgspec.defstruct("_Numbers", _numbers(), frozen=True, kw_only=True)


class Sampling(_Numbers, frozen=True, kw_only=True):
    """How tokens are chosen. A line of ``--prompts FILE.jsonl`` may set each of these for its prompt."""

    ignore_eos: Annotated[
        bool, option("End tokens are tokens like any other: no answer ends with one.", panel="sampling")
    ] = False
    logprobs: Annotated[
        int | None, option("With --json: log-probabilities, and those of the N best tokens.", "N", panel="output")
    ] = None
    stop: Annotated[
        tuple[str, ...],
        option(
            "End where the answer contains this text; may be given up to 16 times.",
            "TEXT",
            panel="sampling",
            typed=list[str] | None,
            read=lambda given: tuple(given or ()),
        ),
    ] = ()

    def __post_init__(self) -> None:
        for text in checked_stops(self.stop, "--stop"):
            check_argument(text, "--stop")

    def params(self) -> SamplingParams:
        """Return the parameters. Raises :class:`InvalidValue`, which names the option.

        At temperature 0 ``top_p`` is set to 1, so that a runner without truncation accepts the parameters.
        """
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("stop", "ignore_eos")}
        try:
            params = SamplingParams(**given)
            return replace(params, top_p=1.0) if params.temperature == 0 else params
        except InvalidValue as error:
            error.argument = typed_name(error.argument)
            raise

    def check_given(self, given: Sequence[str]) -> None:
        """Raise :class:`InvalidValue` if an option of random sampling is given at temperature 0.

        The seed is allowed, because a custom ``--runner`` may use it.
        """
        for name in ("top_p", "top_k", "min_p"):
            if name in given and self.params().temperature == 0:
                cure = "leave it out, or give a --temperature above 0"
                raise InvalidValue("nothing is drawn at --temperature 0", cure=cure, argument=typed_name(name))


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answers go. Raises :class:`InvalidValue` for combinations that are not possible."""

    as_json: Annotated[bool, option("Print one JSON object a prompt, in their order.", names=("--json",))] = False
    verbose: Annotated[bool, option("Show choices, fallbacks and tracebacks.", names=("--verbose", "-v"))] = False
    quiet: Annotated[bool, option("Print the text alone, and errors.", names=("--quiet", "-q"))] = False
    live: Annotated[
        bool,
        option("Show below the text what the run is doing: slots, speed, drafts, hooks' times.", panel="output"),
    ] = False
    sink: Annotated[
        str | None,
        option(
            "Send the records there as well: ipc:// or tcp:// for hal tail or an engine, sysv:// for FastDeploy's "
            "readers. With --dp or --split each worker that sends has a sysv queue of its own, ids counting up.",
            "URL",
            panel="output",
        ),
    ] = None
    key: Annotated[
        Path | None,
        option("With --sink over tcp: the key of hal tail or another reader.", "FILE", panel="output"),
    ] = None
    """File with the shared key of this command and the reader of ``sink``, for tcp."""
    record: Annotated[
        Path | None,
        option("Record what changes the device's state, for hal conform NAME --replay FILE.", "FILE", panel="output"),
    ] = None

    def __post_init__(self) -> None:
        if self.key is not None and not self.sends_by_tcp:
            cure = "leave it out, or give --sink tcp://host:port"
            raise InvalidValue("nothing goes over the network", cure=cure, argument="--key")
        if self.live and (self.quiet or not sys.stderr.isatty()):
            what = "it contradicts --quiet" if self.quiet else "standard error is no terminal"
            raise InvalidValue(what, cure="leave it out", argument="--live")
        if self.quiet and self.verbose:
            raise InvalidValue("it contradicts --verbose", cure="leave one of them out", argument="--quiet")

    def check_shown(self, prompts: Iterable[Sampling]) -> None:
        """Raise :class:`InvalidValue` if a prompt asks for log-probabilities without ``--json``."""
        if not self.as_json and any(sampling.logprobs is not None for sampling in prompts):
            cure = "give --json as well, or leave it out"
            raise InvalidValue("text does not show them", cure=cure, argument="--logprobs")

    @property
    def sends_by_tcp(self) -> bool:
        """Whether records are sent over the network."""
        return (self.sink or "").startswith("tcp:")

    def sink_keys(self) -> CurveKeys | None:
        """Return the keys for ``--sink``. Raises :class:`InvalidValue` if another host is to be reached without a
        key."""
        if not self.sends_by_tcp:
            return None
        from hal_engine.transport.key_file import record_keys

        return record_keys(str(self.sink), self.key)


def check_argument(text: str, option: str) -> None:
    """Raise :class:`InvalidValue` if an argument holds bytes that the locale cannot decode; Python turns them into
    surrogates."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return
    locale, file = (
        sys.getfilesystemencoding(),
        ", or give it in a UTF-8 file with --prompts" * (option in ("PROMPT", "--prompt")),
    )
    if _is_utf8(text):
        why, cure = f"the locale's encoding, {locale}, cannot carry it", f"set a UTF-8 locale, as LC_ALL=C.UTF-8{file}"
    else:
        why, cure = f"it has bytes that are no text in {locale}, the locale's encoding", f"send it as {locale}{file}"
    raise InvalidValue(why, cure=cure, argument=option)


def _is_utf8(text: str) -> bool:
    """Return whether the bytes of an argument are UTF-8, whatever the locale."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return True
