"""Each newer liar lies: the honest device keeps the contract's promise, and the liar does not."""

import os
import sys
from pathlib import Path

import pytest
from hal_conformance.liars import (
    broken,
    copies,
    devices,
    dropped,
    everyone,
    kept,
    large,
    late,
    late_faults,
    lazy,
    leaks,
    life,
    limits,
    nans,
    ordering,
    parts,
    paths,
    ring,
    runtimes,
    sizes,
    slices,
    steps,
    streams,
    swept,
    threads,
    tickets,
    unseen,
    unseen_later,
    values,
    vendors,
    wraps,
)

from tests.ranks import ForkedRanks

sys.path.insert(0, str(Path(__file__).parent))
import liar_proofs_first  # noqa: F401 (each registers its proofs)
import liar_proofs_large  # noqa: F401
import liar_proofs_life  # noqa: F401
import liar_proofs_limits  # noqa: F401
import liar_proofs_paths  # noqa: F401
import liar_proofs_runtimes  # noqa: F401
import liar_proofs_swept  # noqa: F401
import liar_proofs_unseen  # noqa: F401
import liar_proofs_unseen_later  # noqa: F401
import liar_proofs_vendors  # noqa: F401
import liar_proofs_waits  # noqa: F401
import liar_proofs_writes  # noqa: F401
import slice_actions
from liar_proofs import PROOFS, opened

MODULES = (
    sizes,
    ring,
    copies,
    streams,
    values,
    slices,
    life,
    runtimes,
    wraps,
    dropped,
    leaks,
    broken,
    threads,
    lazy,
    nans,
    vendors,
    ordering,
    tickets,
    devices,
    kept,
    limits,
    parts,
    late_faults,
    steps,
    late,
    large,
    unseen,
    unseen_later,
    swept,
    paths,
)
SINGLE = {
    *("CompanionsBookRefusals", "CompanionsBookInTurn", "SizesAreCompared", "OtherTypesLeftOut"),
    *("LastReservationTakesAll", "OlderHandoversEndToo", "ForgetsTheLastMemory", "MemoriesApart"),
    *("ReleasesReachNoCompanion", "ReleasesReachOneCompanion", "LaterCompanionsBehind"),
    *("LeavesBesideACompanionsStep", "GrowsBesideACompanionsStep"),
    *("OrdersAfterNamedCopies", "OrdersAfterTheNewestCopy", "OrdersAfterWholeCopies"),
    *("NamesOfNow", "GoneAreLeftOut"),
}
"""Liars of other modules that have a proof."""
pytestmark = pytest.mark.long(30)
NAMES = {module.__name__ for module in MODULES}
NEW = [one for one in everyone() if one.how.__module__ in NAMES or one.name in SINGLE]


@pytest.mark.parametrize("name", PROOFS)
def test_the_liar_lies_and_the_honest_device_does_not(name):
    make, kept = PROOFS[name]
    with opened(make) as honest:
        assert kept(honest)
    with opened(make, name) as liar:
        assert not kept(liar)


SLICES = {
    "IdleSlotsLeftOut": slice_actions.agree,
    "RestOfTheSliceLeftOut": slice_actions.agree,
    "FlagsLeftOut": slice_actions.agree,
    "LongsAsInts": slice_actions.agree,
    "LowestRankIsTheSource": slice_actions.other_source,
    "DigestOfTheReceiver": slice_actions.tamper_digest,
    "StepOfTheReceiver": slice_actions.tamper_step,
    "OpeningWaitsForEver": slice_actions.join_alone,
    "OpeningTriedAgain": slice_actions.join_alone_twice,
    "TwoCollectives": slice_actions.count_collectives,
}


@pytest.fixture(scope="module")
def pair():
    with ForkedRanks(2) as pool:
        yield pool


@pytest.mark.parametrize("name", SLICES)
def test_the_liar_lies_among_two_ranks(name, pair):
    pytest.importorskip("hal_sim")
    job = f"liars{os.getpid()}"
    assert all(pair.run(SLICES[name], "", f"{job}_{name}", timeout=60.0).values())
    assert not all(pair.run(SLICES[name], name, job, timeout=60.0).values())


def test_every_new_liar_has_its_proof():
    assert {one.name for one in NEW} == PROOFS.keys() | SLICES.keys()
