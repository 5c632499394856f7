"""The state machine as a test: it is marked G9, as every byte is compared, and exercises all other guarantees."""

from __future__ import annotations

from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test

from .fixtures.machine import WorkerMachine
from .harness.guarantees import guarantee
from .harness.properties import Results, explore
from .kit import Kit


@guarantee(9, also=(11, 12, 19, 20, 22))
def test_g09_all_hooks_in_any_order_agree_with_the_model(kit: Kit) -> None:
    class Machine(WorkerMachine):
        pass

    Machine.kit = kit
    seed(kit.effort.seed)(Machine)
    settings = kit.effort.settings(2.0)
    explore(kit.bound.name, Results(), lambda: run_state_machine_as_test(Machine, settings=settings))
