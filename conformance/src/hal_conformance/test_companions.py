"""``insert_tasks`` into a state with companions: the same requests in their own slots (G9), in one call (G10)."""

from __future__ import annotations

from collections.abc import Sequence

from hal_core.slots.declared import StateField, table_with
from hal_core.slots.fields import StateConfig
from hal_core.slots.layout import lay_out
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .harness import backdoor
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .oracle.slots import Model, difference
from .rigs.batches import ALL, ENTER, LEAVE, draw_batch, told
from .rigs.rig import Rig
from .rigs.stepping import free_ended, run_step
from .test_submissions import A_CALL

NAMES = ("proposer", "other")


class Beside:
    """A companion with its model; its bytes follow the target's.

    ``slots``: admission id to the slot that the host chose for the request.
    """

    def __init__(self, rig: Rig, number: int, fields: Sequence[StateField] = ()) -> None:
        self.rig, self.state = rig, rig.state.companions[number]
        self.begin = rig.state.layout.nbytes * (number + 1)
        self.model = Model(lay_out(rig.sizes, table_with(rig.sizes, fields)), fields)
        self.model.requests = rig.model.requests
        self.slots: dict[int, int] = {}
        backdoor.write(rig.device, rig.state.memory, self.begin, self.model.block, rig.stream)

    def inserted(self, tasks: list[Task]) -> None:
        """Apply a batch that was inserted into the target."""
        own = []
        live = self.state.host_table.live
        for task in tasks:
            admission_id = task.request.admission_id
            if task.kind in ENTER:
                assert live[admission_id] not in self.slots.values(), "the host gave a held slot away"
                self.slots[admission_id] = live[admission_id]
            own.append(
                Task(
                    task.kind,
                    self.slots.pop(admission_id) if task.kind in LEAVE else self.slots[admission_id],
                    task.request,
                    task.num_computed_tokens,
                    task.num_scheduled_tokens,
                    task.blocks,
                    task.first_block,
                    task.first_token,
                    task.drafts,
                )
            )
        self.model.insert(own)

    def follow_releases(self) -> None:
        """Free the slots of requests that have left the target."""
        held = {resident.admission_id for resident in self.rig.model.residents.values()}
        gone = [admission_id for admission_id in self.slots if admission_id not in held]
        self.model.release([self.slots.pop(admission_id) for admission_id in gone])

    def check(self, after: str) -> None:
        """Compare every byte of the companion with the model."""
        __tracebackhide__ = True
        whole = backdoor.read(self.rig.device, self.rig.state.memory, self.rig.stream)
        wrong = difference(self.model, whole[self.begin : self.begin + self.model.layout.nbytes])
        assert not wrong, f"companion {self.state.name!r} after {after}: {wrong}"


def opened(kit: Kit, size: StateConfig, count: int) -> tuple[Rig, list[Beside]]:
    """Open a state with so many companions."""
    rig = Rig(kit, size, beside=NAMES[:count])
    return rig, [Beside(rig, number) for number in range(count)]


@guarantee(9)
@examples()
def test_g09_one_insertion_serves_a_state_and_its_companions(kit: Kit, draw: Draw) -> None:
    rig, others = opened(kit, draw(sizes(), "sizes"), draw(st.integers(1, 2), "companions"))
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, rig, ALL)
        rig.insert(tasks).wait(PATIENCE)
        for other in others:
            other.inserted(tasks)
        rig.check(f"insert_tasks({told(tasks)})")
        for other in others:
            other.check(f"insert_tasks({told(tasks)})")
        rig.output(run_step(draw, rig))
        free_ended(rig)
        for other in others:
            other.model.clean_up(range(rig.sizes.num_slots))
            other.check("a step of the target, and its output")
            other.follow_releases()


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_companions_take_no_submission_of_their_own(kit: Kit, draw: Draw) -> None:
    rig, others = opened(kit, draw(sizes(), "sizes"), 2)
    for kinds in ((TaskKind.PREFILL,), ALL):
        before = rig.bound.counters()
        tasks = draw_batch(draw, rig, kinds, least=1)
        ticket = rig.insert(tasks)
        cost = rig.bound.counters() - before
        ticket.wait(PATIENCE)
        assert cost.submissions <= A_CALL, (
            f"{cost.submissions} submissions for three states, but at most {A_CALL} are due"
        )
        for other in others:
            other.inserted(tasks)
            other.check(f"insert_tasks({told(tasks)})")
        rig.output(run_step(draw, rig))
        free_ended(rig)
        for other in others:
            other.model.clean_up(range(rig.sizes.num_slots))
            other.follow_releases()
