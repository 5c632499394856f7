"""Plan of ``hal run``, made before anything runs: prompts, requests, sizes, and whether any request can run."""

from __future__ import annotations

import heapq
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from hal_core import InvalidValue, Request, SamplingParams, StateConfig, lay_out

from hal_engine.engine import Limits, Scheduler, tokens_to_keep
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import TextConfig
from hal_engine.model.files import read_file
from hal_engine.model.streaming import AnswerText
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.options import CHECK_RANKS, EngineOptions, EngineSetup
from hal_engine.proposers import check_names
from hal_engine.proposers.checks import check_layer
from hal_engine.sizing import BLOCK_SIZE, config_of, setup_of
from hal_engine.spelling import meant

from .run_options import Output, Sampling, check_argument

_NO_OUTPUT = Output()
_LINES = "--prompts"
_STANDARD_INPUT = "-"
_CURE = 'hal run "def main(", --prompts FILE, or a pipe'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, with its sampling parameters."""

    text: str
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts in their order. ``skipped``: the empty lines of files and standard input."""

    prompts: Sequence[Prompt]
    skipped: int = 0

    @property
    def notes(self) -> list[str]:
        """Return lines for the user."""
        return [f"{self.skipped} empty line{'s' * (self.skipped > 1)} skipped"] if self.skipped else []


def read_prompts(given: Sequence[str], named: Sequence[str], file: Path | None, sampling: Sampling) -> Prompts:
    """Read the prompts: arguments, then those of ``--prompt``, then those of a file.

    The argument ``-`` means standard input, which is also read if it is a pipe and no other prompt is given. Raises
    :class:`InvalidValue` if all prompts are empty.
    """
    read: list[Prompt] = []
    skipped = 0
    sources = [(text, "PROMPT") for text in given] + [(text, "--prompt") for text in named]
    if not sources and file is None and sys.stdin is not None and not sys.stdin.isatty():
        sources = [(_STANDARD_INPUT, "PROMPT")]
    for text, option in sources:
        if text == _STANDARD_INPUT and option == "PROMPT":
            found = _of_lines(sys.stdin.buffer.read(), "standard input", sampling, "PROMPT")
            read, skipped = [*read, *found.prompts], skipped + found.skipped
        else:
            check_argument(text, option)
            read.append(Prompt(text, sampling))
    if file is not None:
        found = _of_file(file, sampling)
        read, skipped = [*read, *found.prompts], skipped + found.skipped
    if not read:
        raise InvalidValue("there is none", cure=f"give one: {_CURE}", argument="PROMPT")
    if not any(prompt.text for prompt in read):
        only = "the only prompt is empty" if len(read) == 1 else f"all {len(read)} prompts are empty"
        raise InvalidValue(only, cure="give a text of at least one character", argument=sources[0][1])
    return Prompts(read, skipped)


def _of_file(file: Path, sampling: Sampling) -> Prompts:
    try:
        data = read_file(file)
    except InvalidValue as error:
        raise InvalidValue(f"{str(file)!r}: {error.what}", cure="give a smaller file", argument=_LINES) from None
    except FileNotFoundError:
        cure = "give a file with one prompt a line"
        raise InvalidValue(f"no file {str(file)!r}", cure=cure, argument=_LINES) from None
    except OSError as error:
        what = f"cannot read {str(file)!r}: {error.strerror}"
        raise InvalidValue(what, cure="give a readable file", argument=_LINES) from None
    if file.suffix != ".jsonl":
        return _of_lines(data, repr(str(file)), sampling, _LINES)
    lines = [*enumerate(_text(data, repr(str(file)), _LINES).split("\n"), 1)]
    return _kept((_of_object(line, f"{file.name} line {at}", sampling) if line.strip() else None for at, line in lines))


def _of_lines(data: bytes, name: str, sampling: Sampling, argument: str) -> Prompts:
    lines = _text(data, name, argument).split("\n")
    found = _kept(Prompt(line, sampling) if line.strip() else None for line in lines)
    if not found.prompts:
        what = f"{name} is empty" if not data else f"{name} has empty lines alone"
        raise InvalidValue(what, cure=f"write one prompt a line; or {_CURE}", argument=argument)
    return found


def _kept(found: Iterable[Prompt | None]) -> Prompts:
    read = [*found]
    kept = [prompt for prompt in read if prompt is not None]
    return Prompts(kept, len(read) - len(kept))


def _text(data: bytes, name: str, argument: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name} is no UTF-8 text: {error}", cure="convert it", argument=argument) from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def _of_object(line: str, place: str, sampling: Sampling) -> Prompt:
    """Return the prompt of a line of JSON. Its sampling parameters replace the command's."""
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(place, f"no JSON: {error}", 'write {"prompt": "def main("}') from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
        raise _refused(place, "no object with a prompt, which is a text", 'write {"prompt": "def main("}')
    changes: Mapping[str, Any] = {key: value for key, value in fields.items() if key != "prompt"}
    known = Sampling.__struct_fields__
    for key in changes:
        if key not in known:
            close = meant(key, known)
            raise _refused(place, f"unknown key {key!r}", f"did you mean {close!r}?" if close else ", ".join(known))
    if isinstance(stop := changes.get("stop", ()), str):
        stop = [stop]
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise _refused(place, f"stop = {stop!r}", "give a text or a list of texts")
    if not isinstance(ignore := changes.get("ignore_eos", False), bool):
        raise _refused(place, f"ignore_eos = {ignore!r}", "give true or false")
    try:
        own = msgspec.structs.replace(sampling, **{**changes, **({"stop": tuple(stop)} if "stop" in changes else {})})
        own.params()
    except InvalidValue as error:
        raise _refused(place, f"{error.argument.lstrip('-').replace('-', '_')}: {error.what}", error.cure) from None
    return Prompt(fields["prompt"], own)


def _refused(place: str, what: str, cure: str) -> InvalidValue:
    return InvalidValue(f"{place}: {what}", cure=cure, argument=_LINES)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests in the order of their prompts, and the engine's setup."""

    prompts: Sequence[str]
    requests: Sequence[Request]
    tokenizer: Tokenizer
    setup: EngineSetup
    stops: Mapping[str, Sequence[str]]
    """Stop texts by request id."""
    notes: Sequence[str]

    def answer(self, request: Request) -> AnswerText:
        """Return an incremental decoder for a request's answer."""
        return AnswerText(
            self.tokenizer.stream(request.prompt), self.stops[request.request_id], request.params.min_tokens
        )


def make_plan(
    prompts: Sequence[Prompt], options: EngineOptions, output: Output = _NO_OUTPUT, notes: Sequence[str] = ()
) -> Plan:
    """Tokenize the prompts and compute the sizes. Raises :class:`InvalidValue` if no request can run."""
    check_names(options.speculate)
    model = DEFAULT_CHECKPOINT if options.model is None else Path(options.model)
    config = config_of(options, model)
    check_layer(options.speculate, config)
    tokenizer = Tokenizer.load(model, config)
    for number, prompt in enumerate(prompts, 1):
        with _of_prompt(number, len(prompts)):
            tokenizer.check_length(prompt.text, config.max_position_embeddings)
    encoded = iter(tokenizer.encode_all([prompt.text for prompt in prompts if prompt.text]))
    requests = [
        Request(f"r{number}", next(encoded) if prompt.text else [], _for_model(prompt.sampling, config))
        for number, prompt in enumerate(prompts)
    ]
    sizes = StateConfig(
        num_slots=min(options.slots, len(requests)),  # more would never be used
        max_model_len=min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings),
        block_size=BLOCK_SIZE,
        max_draft_tokens=options.most_drafts,
        max_logprobs=max(request.params.logprobs or 0 for request in requests),
        max_eos=max(1, *(len(request.params.eos_token_ids) for request in requests)),
        max_stop_sequences=1,
        max_stop_length=1,
        max_bad_words=1,
        vocab_size=config.vocab_size,
    )
    Limits.of(options).check(sizes)
    blocks, keys = _blocks(requests, sizes, options), output.sink_keys()
    setup = setup_of(
        options,
        model,
        sizes,
        blocks,
        sink=output.sink or "",
        sink_key="" if keys is None else keys.secret,
        check=os.environ.get(CHECK_RANKS, "") not in ("", "0"),
        params=_checked_alike(requests) if options.several and options.named_runner else None,
    )
    stops = {request.request_id: prompt.sampling.stop for request, prompt in zip(requests, prompts, strict=True)}
    texts = [prompt.text for prompt in prompts]
    return Plan(texts, requests, tokenizer, setup, stops, [*notes, *config.notes])


def _checked_alike(requests: Sequence[Request]) -> SamplingParams:
    """Return the parameters that ranks check their runner for. Raises :class:`InvalidValue` if requests differ in what
    not every runner supports."""
    if len({replace(request.params, seed=0, min_tokens=0, max_tokens=1) for request in requests}) > 1:
        raise InvalidValue(
            "lines differ in how they sample, and ranks check their runner for one way",
            cure="give these parameters as options, or leave --runner out",
            argument="--prompts",
        )
    return requests[0].params


@contextmanager
def _of_prompt(number: int, count: int) -> Iterator[None]:
    """Have an error name the prompt by its number."""
    try:
        yield
    except InvalidValue as error:
        error.argument = f"prompt {number} of {count}" if count > 1 else "PROMPT"
        raise


def _for_model(sampling: Sampling, config: TextConfig) -> SamplingParams:
    """Return the parameters with the model's end tokens. Stop texts are matched in the decoded text, because token
    borders may fall inside them."""
    params = sampling.params()
    if (params.logprobs or 0) > config.vocab_size:
        raise InvalidValue(
            f"{params.logprobs}", cure=f"the model has {config.vocab_size} tokens; ask for fewer", argument="--logprobs"
        )
    return replace(params, eos_token_ids=() if sampling.ignore_eos else config.eos_token_ids)


def _blocks(requests: Sequence[Request], sizes: StateConfig, options: EngineOptions) -> int:
    """Return the number of KV blocks: the requested number, but no more than can be used at once.

    Raises the first error if no request can run.
    """
    unlimited = Scheduler(lay_out(sizes), sizes.num_slots * sizes.max_blocks)
    needs, errors = [], []
    for request in requests:
        try:
            unlimited.check(request)
        except InvalidValue as error:
            errors.append(error)
        else:
            needs.append(-(-tokens_to_keep(len(request.prompt), request.params.max_tokens) // sizes.block_size))
    if not needs:
        raise errors[0]
    most = sum(heapq.nlargest(sizes.num_slots, needs))
    if options.blocks is not None and options.blocks < min(needs):
        raise InvalidValue(
            f"{options.blocks} of {sizes.block_size} tokens cannot hold any of the prompts with its --max-tokens",
            cure=f"give at least {min(needs)} ({max(needs)} can hold each of them), or lower --max-tokens",
            argument="--blocks",
        )
    return min(options.blocks or most, most)
