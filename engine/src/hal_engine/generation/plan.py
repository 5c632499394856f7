"""A model as an engine is asked for it: its tokenizer, its defaults for sampling, and the sizes that it gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hal_core import InvalidValue, Request, SamplingParams, StateConfig, draw_seed

from hal_engine.engine import Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.fields import read_json
from hal_engine.model.stops import checked_stops
from hal_engine.model.streaming import AnswerText
from hal_engine.model.tokenizer import Tokenizer, TooLong
from hal_engine.options import EngineOptions, EngineSetup
from hal_engine.proposers import check_names
from hal_engine.proposers.checks import check_layer
from hal_engine.sizing import BLOCK_SIZE, config_of, setup_of
from hal_engine.spelling import meant

LONGEST = 8192
"""Most tokens of a request with its prompt, unless asked otherwise."""
_USUAL = 512
"""Tokens of a request for which each slot gets blocks, unless asked otherwise."""
MOST_ENDS = 16
"""End tokens that a request may have beside the model's."""
_OWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are defaults for sampling, under the same names here."""


SAMPLING = (*SamplingParams.__dataclass_fields__, "ignore_eos")
"""Names of a request's parameters."""


def check_known(names: Iterable[str], known: Sequence[str] = SAMPLING, others: Sequence[str] = ()) -> None:
    """Raise :class:`InvalidValue` for a name that is not ``known``. ``others``: what else could be meant."""
    for name in names:
        if name not in known:
            close = meant(name, [*known, *others])
            cure = f"did you mean {close}?" if close else f"known: {', '.join([*others, *known])}"
            raise InvalidValue("no such parameter", cure=cure, argument=name)


def longest_of(setup: EngineSetup) -> int:
    """Return the most tokens of a request with its prompt."""
    sizes = setup.sizes
    return min(sizes.max_model_len, setup.blocks * sizes.block_size + 1)  # the last token is not fed


def check_request(setup: EngineSetup, ids: Sequence[int], max_tokens: int) -> None:
    """Raise :class:`InvalidValue`, naming ``prompt`` or ``max_tokens``, for a request that can never run."""
    vocabulary, longest = setup.sizes.vocab_size or 1, longest_of(setup)
    if not ids:
        raise InvalidValue("the prompt has no tokens", cure="give at least one", argument="prompt")
    if len(ids) + max_tokens > longest:
        what = f"{len(ids)} tokens of the prompt and {max_tokens} to generate are more than {longest}"
        fits = len(ids) < longest
        cure = f"lower max_tokens to {longest - len(ids)}, or shorten the prompt" if fits else "shorten the prompt"
        raise TooLong(what, cure=cure, argument="max_tokens" if fits else "prompt")
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:  # of no more ids than fit
        cure = f"give ids from 0 to {vocabulary - 1}"
        raise InvalidValue(f"token {wrong[0]} is outside the vocabulary", cure=cure, argument="prompt")


class ModelPlan:
    """Reads a checkpoint's files; no framework, no device. Raises :class:`InvalidValue` for what cannot be run."""

    def __init__(self, model: str | os.PathLike[str] | None, options: EngineOptions | None = None) -> None:
        self.path = DEFAULT_CHECKPOINT if model is None else Path(model)
        self.config = config_of(options or EngineOptions(), self.path)
        self.tokenizer = Tokenizer.load(self.path, self.config)
        self.defaults = self._read_defaults()

    def _read_defaults(self) -> SamplingParams:
        """The checkpoint's own defaults, else OpenAI's: temperature 1, 16 tokens."""
        path = self.path / "generation_config.json"
        given: Mapping[str, Any] = read_json(path) if path.exists() else {}
        own = {name: given[name] for name in _OWN_DEFAULTS if given.get(name) is not None}
        if given.get("do_sample") is False:
            own["temperature"] = 0.0
        try:
            return SamplingParams(**{"temperature": 1.0, **own})
        except InvalidValue as error:
            error.argument = f"{path}: {error.argument}"
            raise

    def params(self, given: SamplingParams | None, *, ignore_eos: object = False, **changed: object) -> SamplingParams:
        """The parameters of a request: those that are given whole, or the defaults with what is ``changed``. Without a
        ``seed`` each request has its own.

        The model's end tokens are added to the request's own; with ``ignore_eos`` they are tokens like any other.
        """
        if given is None:
            seed = int.from_bytes(os.urandom(8), "little") >> 1
            check_known(changed)
            given = replace(self.defaults, **{"seed": seed, **changed})  # type: ignore[arg-type]
        if not isinstance(ignore_eos, bool):
            raise InvalidValue(f"{ignore_eos!r}", cure="give True or False", argument="ignore_eos")
        own, size = given.eos_token_ids, self.config.vocab_size
        if len(own) > MOST_ENDS:
            raise InvalidValue(f"{len(own)} ids", cure=f"give at most {MOST_ENDS}", argument="eos_token_ids")
        if wrong := [token for token in own if token >= size]:
            what = f"token {wrong[0]} is outside the vocabulary"
            raise InvalidValue(what, cure=f"give ids from 0 to {size - 1}", argument="eos_token_ids")
        models = () if ignore_eos else self.config.eos_token_ids
        return replace(given, eos_token_ids=tuple({*own, *models}))

    def request(
        self, name: str, ids: Sequence[int], params: SamplingParams, number: int = 0, priority: int = 0
    ) -> Request:
        """A request whose draws depend on its seed, its position and ``number`` alone, whatever its ``name``: they are
        those of prompt ``number`` of ``hal run``."""
        seed = draw_seed(draw_seed(params.seed, f"r{number}"), name)  # the name's part twice is none
        return Request(name, ids, replace(params, seed=seed), priority=priority)

    def answer(self, prompt: Sequence[int], stop: str | Sequence[str], params: SamplingParams) -> AnswerText:
        """The text of an answer, which ends with the first stop text in it."""
        return AnswerText(self.tokenizer.stream(prompt), checked_stops(stop), params.min_tokens)

    def serve(self, options: EngineOptions, *, timed: bool = False) -> EngineSetup:
        """Return everything that an engine for any requests is made of.

        ``blocks``: by default enough for 512 tokens a slot and one longest request. ``timed``: measure the device's
        time of steps, on a device that can. Raises :class:`InvalidValue` that names the option.
        """
        check_names(options.speculate)
        check_layer(options.speculate, self.config)
        options.check_launcher()
        longest = min(options.max_model_len or LONGEST, self.config.max_position_embeddings)
        sizes = StateConfig(
            num_slots=options.slots,
            max_model_len=longest,
            max_draft_tokens=options.most_drafts,
            block_size=BLOCK_SIZE,
            max_eos=MOST_ENDS + len(self.config.eos_token_ids),
            max_stop_sequences=1,
            max_stop_length=1,
            max_bad_words=1,
            vocab_size=self.config.vocab_size,
        )
        Limits.of(options).check(sizes)
        usual = max(-(-longest // BLOCK_SIZE), options.slots * -(-min(_USUAL, longest) // BLOCK_SIZE))
        return setup_of(options, self.path, sizes, usual if options.blocks is None else options.blocks, timed=timed)
