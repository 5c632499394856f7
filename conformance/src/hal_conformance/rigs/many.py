"""States of 512 slots, and requests that differ in every field."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hal_core.slots.admission import AdmittedRequest, Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from ..harness.backdoor import arrive
from ..kit import Kit
from .rig import Rig

MANY = StateConfig(
    num_slots=512,
    max_model_len=96,
    block_size=4,
    max_draft_tokens=2,
    max_logprobs=1,
    max_eos=2,
    max_stop_sequences=2,
    max_stop_length=3,
    max_bad_words=3,
)


def varied(at: int, size: StateConfig = MANY) -> SamplingParams:
    """Return parameters that differ from request to request in every field."""
    return SamplingParams(
        temperature=0.5 + at / 1024,
        top_k=at,
        top_p=1 - at / 16384,
        min_p=at / 65536,
        seed=at * 2**33 + 7,
        repetition_penalty=1 + at / 4096,
        frequency_penalty=-at / 8192,
        presence_penalty=at / 2048,
        min_tokens=at % 3,
        max_tokens=40 + at,
        stop_sequences=tuple((at + 1,) * (1 + k) for k in range(at % 3))[: size.max_stop_sequences],
        bad_words=tuple(range(at, at + at % 4)),
        eos_token_ids=tuple(range(at, at + at % 3)),
        logprobs=None if at % 3 == 0 else at % 2,
    )


def prompt(at: int, length: int) -> list[int]:
    """Return tokens that no other request has at these positions."""
    return ((np.arange(length, dtype=np.int64) * 1_000_003 + at * 7919) % 2**31).tolist()


def request(rig: Rig, at: int, *, output: int = 0) -> AdmittedRequest:
    """Return the ``at``-th request: its length, rows and parameters depend on the number."""
    tokens = prompt(at, 1 + at % 37 + output)
    cut = len(tokens) - output
    return rig.admit(Request(rig.new_name(), tokens[:cut], varied(at % 1000), tokens[cut:]))


def blocks(size: StateConfig, covered: int, at: int) -> list[int]:
    """Return block ids for so many tokens, including large ones."""
    return [(at * 131 + k * 524_287) % 2**31 for k in range(-(-covered // size.block_size))]


def prefill(rig: Rig, slot: int, admitted: AdmittedRequest, length: int = 0) -> Task:
    """Return a task for a new request, with all its tokens unless a length is given."""
    length = length or admitted.total
    return Task(TaskKind.PREFILL, slot, admitted, 0, length, blocks(rig.sizes, length, admitted.admission_id))


def handoff(rig: Rig, slot: int, admitted: AdmittedRequest) -> Task:
    """Return a task for the decode role of a split."""
    drafts = [slot, 2**31 - 1 - slot][: slot % (rig.sizes.max_draft_tokens + 1)]
    ids = blocks(rig.sizes, admitted.total, admitted.admission_id)
    return Task(TaskKind.REMOTE_PREFILL, slot, admitted, admitted.total, 0, ids, first_token=slot * 3, drafts=drafts)


def leaving(rig: Rig, slots: Sequence[int], kind: TaskKind) -> list[Task]:
    """Return tasks that remove the requests from these slots."""
    return [Task(kind, slot, rig.model.residents[slot].admitted) for slot in slots]


def filled(kit: Kit, size: StateConfig = MANY) -> Rig:
    """Return a state with a request in every slot, some of them partly prefilled."""
    rig = Rig(kit, size)
    slots = np.random.default_rng(21).permutation(size.num_slots).tolist()
    admitted = [request(rig, slot) for slot in slots]
    tasks = [
        prefill(rig, slot, one, one.total // 2 if slot % 2 == 0 else 0)
        for slot, one in zip(slots, admitted, strict=True)
    ]
    arrive(rig.insert(tasks))
    return rig


def stepped(rig: Rig, turn: int) -> None:
    """Run one step over all slots in some order; compare its output and every byte of the state."""
    slots = rig.sizes.num_slots
    order = np.random.default_rng(22 + turn).permutation(slots).tolist()
    step = rig.step(order, logprobs=1, speculative=turn % 2 == 1)
    shape = (slots, rig.sizes.max_accept, rig.sizes.max_logprobs + 1)
    count = int(np.prod(shape))
    sampled = np.arange(slots, dtype=np.int64) * 3 + 2**32 + turn
    accepted = np.arange(slots * rig.sizes.max_accept, dtype=np.int64).reshape(slots, -1) * 5 + 2**33 + turn
    alternatives = np.arange(count, dtype=np.int64).reshape(shape) * 7
    alternatives[:, :, 0] = accepted if step.speculative else sampled[:, None]
    rig.poke(
        {
            "sampled_token_ids": sampled,
            "accept_tokens": accepted,
            "accept_num": np.arange(slots, dtype=np.int32) % rig.sizes.max_accept + 1,
            "topk_token_ids": alternatives,
            "topk_logprobs": -(np.arange(count, dtype=np.float32) + 1) / 8,
            "topk_ranks": np.arange(slots * rig.sizes.max_accept, dtype=np.int32),
        }
    )
    arrive(rig.update_inputs(step))
    rig.check(f"a step over {slots} slots")
    rig.output(step)
    rig.check(f"the output of {slots} slots")
