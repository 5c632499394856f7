"""The ring's tests begin with a ring in one piece, wherever the previous writes have left its spans."""

import pytest
from hal_conformance import test_ring
from hal_conformance.fixtures.ring_cases import RING, RingWrites, arrive, pressed
from hal_conformance.harness.subject import Subject
from hal_conformance.kit import Effort, Kit
from hal_core.contract.support import Support

from .queued_device import queued


@pytest.mark.parametrize("left", [0, 1, RING // 4, RING * 11 // 20, RING])
@pytest.mark.parametrize("same", [True, False], ids=["one-stream", "two-streams"])
def test_a_ring_whose_first_span_begins_anywhere(monkeypatch, left, same):
    """A quarter of the ring before its oldest span, and less than the rest behind it, was taken for a full one."""

    class Late(RingWrites):
        def __init__(self, kit, nbytes):
            super().__init__(kit, nbytes + 2 * RING)
            for span in (left, 1):
                arrive(self.must_write(span, self.block.stream))

    monkeypatch.setattr(test_ring, "RingWrites", Late)
    kit = Kit(Subject("queued", queued, Support()), Effort("quick"))
    with pressed(kit) as small:
        test_ring.test_g03_a_full_ring_waits_for_its_oldest_entry_alone(small, same)
