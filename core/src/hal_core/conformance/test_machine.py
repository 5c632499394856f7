"""The state machine as a test: it bears G9, as every byte is compared, and drives all other guarantees along."""

from __future__ import annotations

from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test

from .guarantees import guarantee
from .kit import Kit
from .machine import WorkerMachine


@guarantee(9)
def test_g09_all_hooks_in_any_order_agree_with_the_model(kit: Kit) -> None:
    class Machine(WorkerMachine):
        pass

    Machine.kit = kit
    seed(kit.effort.seed)(Machine)
    run_state_machine_as_test(Machine, settings=kit.effort.settings(2.0))
