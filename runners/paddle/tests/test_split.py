"""A request that one worker prefills and another decodes: the end of the first part, and the input of the second."""

from dataclasses import replace

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason, SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hal_paddle_runner.worker import Worker

SIZES = StateConfig(num_slots=2, max_model_len=32, block_size=4, max_logprobs=2)
PROMPT, BLOCKS = [0, 9, 7, 8, 9], [4, 2]  # after which the model would give its first token twice
TOTAL = len(PROMPT)


def worker(device, model, sizes=SIZES):
    return Worker(device, model, sizes, 8, MemorySink())


def tokens_of(record):
    return [(row.request_id, row.tokens.tolist(), row.finish) for row in record.rows()]


def prefilled(device, model, params):
    """A worker that has prefilled the request in its first step, and the first token."""
    prefill = worker(device, model)
    request = prefill.admit(Request("r", PROMPT, params, role=SplitRole.PREFILL))
    record = prefill.step([Task(TaskKind.PREFILL, 1, request, 0, TOTAL, BLOCKS)])
    ((_, (first,), finish),) = tokens_of(record)
    assert finish is FinishReason.NONE
    return prefill, first


def handoff(decode, params, first, start=TOTAL, drafts=()):
    request = decode.admit(Request("r", PROMPT, params, role=SplitRole.DECODE))
    return Task(TaskKind.REMOTE_PREFILL, 0, request, start, 0, BLOCKS, first_token=first, drafts=drafts)


def alone(device, model, params, steps):
    """The tokens of a worker that plays both parts."""
    both = worker(device, model)
    request = both.admit(Request("r", PROMPT, params))
    found = tokens_of(both.step([Task(TaskKind.PREFILL, 0, request, 0, TOTAL, [0, 1])]))
    for _ in range(steps - 1):
        found += tokens_of(both.step([]))
    return [token for _, tokens, _ in found for token in tokens]


def test_a_worker_of_the_prefill_role_gives_one_token_and_is_free(opaque, oracle):
    prefill, first = prefilled(opaque, oracle, SamplingParams(max_tokens=9))
    assert first == oracle.expected(PROMPT, 1)[0]
    for _ in range(2):
        assert len(prefill.step([]).request_ids) == 0
    assert prefill.model.rows == [1], "the slot was fed again after its first token"
    request = prefill.admit(Request("next", [3], role=SplitRole.PREFILL))
    ((name, tokens, _),) = tokens_of(prefill.step([Task(TaskKind.PREFILL, 1, request, 0, 1, [0])]))
    assert (name, tuple(tokens)) == ("next", oracle.expected([3], 1))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, presence_penalty=2.0)],
    ids=["plain", "penalties"],
)
def test_a_handoff_with_its_blocks_goes_on_as_one_worker_would(opaque, oracle, params):
    prefill, first = prefilled(opaque, oracle, params)
    decode = worker(opaque, type(oracle)())
    decode.model.cache[BLOCKS] = prefill.model.cache[BLOCKS]
    found = [first]
    tasks = [handoff(decode, params, first)]
    while not found[1:] or decode.state.host_table.requests[0] is not None:
        ((_, tokens, _),) = tokens_of(decode.step(tasks))
        found, tasks = found + tokens, []
    assert found == alone(opaque, type(oracle)(), params, 4)
    assert (found[1] == first) == (params.presence_penalty == 0)


@pytest.mark.parametrize("max_draft_tokens", [0, 2])
@pytest.mark.parametrize("drafts", [(), (5, 6)])
def test_a_handoff_without_its_blocks_is_refused_and_nothing_runs(opaque, oracle, max_draft_tokens, drafts):
    decode = worker(opaque, oracle, replace(SIZES, max_draft_tokens=max_draft_tokens))
    params = SamplingParams(max_tokens=4)
    plain = drafts and not max_draft_tokens
    with pytest.raises(InvalidValue if plain else InvalidBatch) as caught:
        decode.step([handoff(decode, params, 3, start=0, drafts=drafts)])
    assert (caught.value.hook, caught.value.argument, bool(caught.value.cure)) == ("insert_tasks", "tasks", True)
    assert ("drafts" if plain else "0 of its 5 tokens are declared present") in caught.value.what
    assert decode.model.rows == []
    decode.model.cache[BLOCKS] = np.array([[0, 9, 7, 8], [9, -1, -1, -1]])
    decode.step([handoff(decode, params, 3)])
    assert decode.model.rows == [1]


@pytest.mark.parametrize("right", [0, 1, 2])
def test_the_drafts_of_a_handoff_are_verified(opaque, oracle, right):
    """The tokens are those of one worker; all right drafts are taken with the next token, in one step."""
    params = SamplingParams(max_tokens=9)
    prefill, first = prefilled(opaque, oracle, params)
    expected = alone(opaque, type(oracle)(), params, 9)
    drafts = [token if number < right else (token + 1) % 97 for number, token in enumerate(expected[1:3])]
    decode = worker(opaque, type(oracle)(), replace(SIZES, max_draft_tokens=2))
    decode.model.cache[BLOCKS] = prefill.model.cache[BLOCKS]
    ((_, tokens, _),) = tokens_of(decode.step([handoff(decode, params, first, drafts=drafts)]))
    assert tokens == expected[1 : 2 + right]
    assert (decode.acceptance.drafted, decode.acceptance.accepted, decode.acceptance.turns) == (2, right, 1)


@pytest.mark.parametrize(
    ("drafts", "why"), [((5, 97), "not all below 97"), ((5, 6, 7), "do not fit into its 2 blocks")]
)
def test_drafts_of_a_handoff_that_cannot_be_fed_are_refused(opaque, oracle, drafts, why):
    decode = worker(opaque, oracle, replace(SIZES, max_draft_tokens=3))
    with pytest.raises(InvalidValue, match=why):
        decode.step([handoff(decode, SamplingParams(max_tokens=9), 3, drafts=drafts)])
    assert decode.state.host_table.requests == [None, None]
