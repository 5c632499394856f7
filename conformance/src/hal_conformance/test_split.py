"""The two roles of a prefill/decode split: where one stops, and what the other must get (G12)."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.world import World
from .harness.asserts import assert_raises, assert_says
from .harness.guarantees import guarantee
from .kit import Kit

SIZES = StateConfig(num_slots=3, max_model_len=24, block_size=4, max_draft_tokens=2, max_logprobs=0)
KINDS = pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])


def prefilling(kit: Kit) -> World:
    """Return a state: slots 0 and 1 have the prefill role, the prompt of slot 1 in two pieces; slot 2 has both
    roles."""
    fixture = World(kit, SIZES)
    fixture.enter(
        fixture.entering(slot, [1, 2, 3, 4], name=f"r{slot}", length=2 if slot == 1 else 4, role=role, max_tokens=20)
        for slot, role in enumerate((SplitRole.PREFILL, SplitRole.PREFILL, SplitRole.MIXED))
    )
    return fixture


def stepped(fixture: World, speculative: bool) -> dict[str, list[int]]:
    """Run one step that offers each slot as many tokens as allowed; return request to the tokens in its record."""
    n, most = SIZES.num_slots, SIZES.max_accept
    tokens = 10 * fixture.steps + np.arange(n * most).reshape(n, most)
    fixture.poke({"sampled_token_ids": tokens[:, 0], "accept_tokens": tokens, "accept_num": np.full(n, most)})
    step = fixture.advance(range(n), speculative=speculative)
    fixture.check(f"step {step.number}")
    return {row.request_id: row.tokens for row in fixture.output(step)}


@guarantee(12)
@KINDS
def test_g12_the_prefill_role_stops_after_its_first_token(kit: Kit, speculative: bool) -> None:
    fixture = prefilling(kit)
    given = stepped(fixture, speculative)
    assert len(given["r0"]) == 1, f"a prefill node gave {given['r0']} for r0, but should give the first token alone"
    assert given["r1"] == [], f"half a prompt gave {given['r1']}"
    fixture.enter([Task(TaskKind.PREFILL_CHUNK, 1, fixture.model.residents[1].admitted, 2, 2, (), 1)])
    later = stepped(fixture, speculative)
    assert later["r0"] == [], f"r0 continued with {later['r0']} after its first token"
    assert len(later["r1"]) == 1, f"the rest of a prompt gave {later['r1']}, but should give the first token alone"
    last = stepped(fixture, speculative)
    assert [last["r0"], last["r1"]] == [[], []], f"a prefill node continued to decode: {last}"
    assert len(last["r2"]) == (SIZES.max_accept if speculative else 1), f"r2, which plays both parts, gave {last}"
    fixture.release([0, 1])
    fixture.enter([fixture.entering(0, [5], name="next")])
    assert len(stepped(fixture, speculative)["next"]) >= 1, (
        "the slot of a prefill node that is done gives its next nothing"
    )


@guarantee(12)
def test_g12_drafts_of_the_prefill_role_travel_only_with_its_output(kit: Kit) -> None:
    fixture = prefilling(kit)
    fixture.poke({"accept_tokens": np.full((3, 3), 7), "accept_num": np.ones(3)})
    step = fixture.advance(range(3), speculative=True)
    fixture.output(step)
    call = {"state": fixture.state, "step": step, "drafts": {0: [5]}, "stream": fixture.stream}
    error = assert_raises(InvalidValue, lambda: fixture.bound.set_drafts(**call), "drafts that no output takes along")  # type: ignore[arg-type]
    assert_says(error, device=fixture.bound.name, hook="set_drafts", argument="drafts")
    fixture.draft({2: [5, 6]})
    fixture.check("drafts of a slot that plays both parts, after the output")


@guarantee(12)
@pytest.mark.parametrize("drafts", [(), (5, 6)], ids=["no-drafts", "drafts"])
@pytest.mark.parametrize("declared", [0, 3, 5])
def test_g12_a_handoff_waits_until_its_blocks_are_declared_present(
    kit: Kit, declared: int, drafts: tuple[int, ...]
) -> None:
    fixture = World(kit, SIZES)
    request = fixture.admit(Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=9), role=SplitRole.DECODE))

    def handoff(start: int) -> Task:
        return Task(TaskKind.REMOTE_PREFILL, 1, request, start, 0, [6], first_token=8, drafts=drafts)

    why = f"a handoff with the keys of {declared} of 4 tokens"
    refuse(fixture, handoff(declared), why)
    fixture.enter([handoff(4)])
    fixture.check("the handoff, once its blocks were there")


@guarantee(12)
def test_g12_a_handoff_of_the_prefill_role_is_refused(kit: Kit) -> None:
    fixture = World(kit, SIZES)
    request = fixture.admit(Request("r", [1, 2], SamplingParams(max_tokens=9), role=SplitRole.PREFILL))
    task = Task(TaskKind.REMOTE_PREFILL, 0, request, 2, 0, [6], first_token=8)
    refuse(fixture, task, "a handoff of a request whose role is PREFILL")


def refuse(fixture: World, task: Task, why: str) -> None:
    """Assert that the task is refused with a reason, and changes nothing."""
    __tracebackhide__ = True
    act = lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=[task], stream=fixture.stream)  # noqa: E731
    assert_says(assert_raises(InvalidBatch, act, why), device=fixture.bound.name, hook="insert_tasks", argument="tasks")
    fixture.check(why)
