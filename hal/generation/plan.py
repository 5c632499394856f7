"""A model as an engine is asked for it: its tokenizer, its defaults for sampling, and the sizes that it gets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hal_core import InvalidValue, Request, SamplingParams, StateConfig, draw_seed

from hal.distributed.words import Ranks, Serve
from hal.engine.budget import DEFAULT_CHUNK, Budget
from hal.model import DEFAULT_CHECKPOINT
from hal.model.config import read_config
from hal.model.streaming import AnswerText
from hal.model.tokenizer import Tokenizer

BLOCK_SIZE = 16
LONGEST = 8192
"""Most tokens of a request with its prompt, unless asked otherwise."""
_USUAL = 512
"""Tokens of a request for which each slot gets blocks, unless asked otherwise."""
_OWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are defaults for sampling, under the same names here."""


class ModelPlan:
    """Reads a checkpoint's files; no framework, no device. Raises :class:`InvalidValue` for what cannot be run."""

    def __init__(self, model: str | os.PathLike[str] | None) -> None:
        self.path = DEFAULT_CHECKPOINT if model is None else Path(model)
        self.config = read_config(self.path)
        self.tokenizer = Tokenizer.load(self.path, self.config)
        self.defaults = self._read_defaults()

    def _read_defaults(self) -> SamplingParams:
        """The checkpoint's own defaults, else OpenAI's: temperature 1, 16 tokens."""
        path = self.path / "generation_config.json"
        given: Mapping[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        own = {name: given[name] for name in _OWN_DEFAULTS if given.get(name) is not None}
        if given.get("do_sample") is False:
            own["temperature"] = 0.0
        try:
            return SamplingParams(**{"temperature": 1.0, **own})
        except InvalidValue as error:
            error.argument = f"{path}: {error.argument}"
            raise

    def params(self, given: SamplingParams | None, **changed: object) -> SamplingParams:
        """The parameters of a request: those that are given whole, or the defaults with what is ``changed``; with the
        model's end tokens. Without a ``seed`` each request has its own."""
        if given is None:
            seed = int.from_bytes(os.urandom(8), "little") >> 1
            try:
                given = replace(self.defaults, **{"seed": seed, **changed})  # type: ignore[arg-type]
            except TypeError as error:
                known = ", ".join(SamplingParams.__dataclass_fields__)
                raise InvalidValue(f"{error}", cure=f"known: {known}", argument="params") from error
        return replace(given, eos_token_ids=tuple({*given.eos_token_ids, *self.config.eos_token_ids}))

    def request(self, name: str, ids: Sequence[int], params: SamplingParams, number: int = 0) -> Request:
        """A request whose draws depend on its seed, its position and ``number`` alone, whatever its ``name``: they are
        those of prompt ``number`` of ``hal run``."""
        seed = draw_seed(draw_seed(params.seed, f"r{number}"), name)  # the name's part twice is none
        return Request(name, ids, replace(params, seed=seed))

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The prompt's token ids. Raises :class:`InvalidValue` for a text that is not UTF-8."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def answer(self, prompt: Sequence[int], stop: str | Sequence[str], params: SamplingParams) -> AnswerText:
        """The text of an answer, which ends with the first stop text in it."""
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(texts):
            raise InvalidValue("an empty text", cure="leave it out", argument="stop")
        return AnswerText(self.tokenizer.stream(prompt), texts, params.min_tokens)

    def serve(
        self,
        *,
        device: str | None,
        ranks: Ranks | None = None,
        require: Mapping[str, str | bool] | None = None,
        place: str = "cpu",
        slots: int = 8,
        blocks: int | None = None,
        max_model_len: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        step_tokens: int | None = None,
        runner: str = "auto",
        dtype: str = "auto",
        overlap: str = "auto",
    ) -> Serve:
        """Everything that an engine is made of. ``blocks``: enough for 512 tokens a slot and one longest request."""
        longest = min(max_model_len or LONGEST, self.config.max_position_embeddings)
        sizes = StateConfig(
            num_slots=slots,
            max_model_len=longest,
            block_size=BLOCK_SIZE,
            max_eos=max(1, len(self.config.eos_token_ids)),
            max_stop_sequences=1,
            max_stop_length=1,
            max_bad_words=1,
            vocab_size=self.config.vocab_size,
        )
        Budget(chunk, step_tokens, sizes)
        usual = max(-(-longest // BLOCK_SIZE), slots * -(-min(_USUAL, longest) // BLOCK_SIZE))
        return Serve(
            model=str(self.path.resolve()),
            place=place,
            device=device or os.environ.get("HAL_DEVICE"),
            require=dict(require or {}),
            sizes=sizes,
            blocks=blocks or usual,
            records="",
            chunk=chunk,
            step_tokens=step_tokens,
            runner=runner,
            dtype=dtype,
            overlap=overlap,
            ranks=ranks,
        )
