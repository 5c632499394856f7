"""Overlapped steps of the engine's own loop give the tokens of waiting steps, in the simulator's strictest modes.

Each schedule runs twice, both times under the race checker, and every token is compared with its prediction.
"""

import pytest
from hal_engine.engine import Scheduler

from .drawn import draw
from .schedules import check, play

pytestmark = pytest.mark.usefixtures("one_process")

MODES = {"lazy": {"polls": 1 << 30}, "worker": {}}
"""As late as possible, however often one asks, and as soon as possible; pageable memory is read when a copy runs."""


def both(number, mode):
    """Run one schedule without overlap and with it; return its preemptions and losses with overlap."""
    schedule = draw(number)
    for overlap in (False, True):
        outcome = play(schedule, mode, overlap=overlap, options=MODES[mode])
        check(schedule, outcome)
    return outcome


@pytest.mark.parametrize("mode", MODES)
def test_overlap_changes_no_token(mode):
    outcomes = [both(number, mode) for number in range(1000, 1014)]
    assert sum(one.preemptions for one in outcomes) > 0
    assert sum(one.losses for one in outcomes) > 0


def test_slots_and_blocks_may_wait_for_the_output_as_well(monkeypatch):
    """As where another stream fills blocks: a worker that decodes requests prefilled elsewhere."""
    monkeypatch.setattr(Scheduler, "one_stream", False)
    assert sum(both(number, "lazy").preemptions for number in range(1014, 1026)) > 0


@pytest.mark.conform
@pytest.mark.parametrize("hundred", range(10))
@pytest.mark.parametrize("mode", MODES)
def test_overlap_changes_no_token_of_a_thousand_schedules(mode, hundred):
    for number in range(hundred * 100, hundred * 100 + 100):
        try:
            both(number, mode)
        except BaseException as error:
            error.add_note(f"schedule {number}, mode {mode}")
            raise
