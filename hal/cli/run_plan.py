"""What ``hal run`` is about to do, found out before anything runs: requests, sizes, and whether any of them can run."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hal_core import InvalidValue, Request, SamplingParams, StateConfig, lay_out

from hal.engine import Scheduler, tokens_to_keep
from hal.engine.budget import Budget
from hal.model.config import LlamaConfig, read_config
from hal.model.streaming import AnswerText
from hal.model.tokenizer import Tokenizer
from hal.proposers import check_names

from .run_options import Options, check_layer

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests in the order of their prompts, and everything that engine and worker are made with."""

    prompts: Sequence[str]
    requests: Sequence[Request]
    config: LlamaConfig
    tokenizer: Tokenizer
    sizes: StateConfig
    blocks: int
    stops: Sequence[str]
    notes: Sequence[str]

    def answer(self, request: Request) -> AnswerText:
        """The text of a request's answer, for its tokens as they come."""
        return AnswerText(self.tokenizer.stream(request.prompt), self.stops, request.params.min_tokens)


def make_plan(texts: Sequence[str], params: SamplingParams, options: Options) -> Plan:
    """Tokenize and size up. Raises :class:`InvalidValue` when no request at all can run."""
    check_names(options.speculate)
    config = read_config(options.model)
    check_layer(options.speculate, config)
    tokenizer = Tokenizer.load(options.model, config)
    params = _for_model(params, config)
    encoded = iter(tokenizer.encode_all([text for text in texts if text]))
    prompts = [next(encoded) if text else [] for text in texts]
    requests = [Request(f"r{number}", tokens, params) for number, tokens in enumerate(prompts)]
    sizes = StateConfig(
        num_slots=min(options.slots, len(requests)),  # more would never be used
        max_model_len=config.max_position_embeddings,
        block_size=BLOCK_SIZE,
        max_draft_tokens=options.most_drafts,
        max_logprobs=params.logprobs or 0,
        max_eos=max(1, len(params.eos_token_ids)),
        max_stop_sequences=1,
        max_stop_length=1,
        max_bad_words=1,
        vocab_size=config.vocab_size,
    )
    _check_budget(options, sizes)
    blocks = _blocks(requests, sizes, options)
    return Plan(texts, requests, config, tokenizer, sizes, blocks, options.stop, config.notes)


def _check_budget(options: Options, sizes: StateConfig) -> None:
    try:
        Budget(options.chunk, options.step_tokens, sizes)
    except InvalidValue as error:
        error.argument = f"--{error.argument.replace('_', '-')}"
        raise


def _for_model(params: SamplingParams, config: LlamaConfig) -> SamplingParams:
    """The parameters with what the model adds: its end tokens. Stop texts are found in the text, where it is decoded:
    as tokens they would be missed wherever the borders of tokens fall otherwise."""
    if (params.logprobs or 0) > config.vocab_size:
        raise InvalidValue(
            f"{params.logprobs}", cure=f"the model has {config.vocab_size} tokens; ask for fewer", argument="--logprobs"
        )
    return dataclasses.replace(params, eos_token_ids=config.eos_token_ids)


def _blocks(requests: Sequence[Request], sizes: StateConfig, options: Options) -> int:
    """KV blocks for the cache: what was asked for, but no more than can be used at once.

    Raises the first error when no request can run, before anything does.
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
