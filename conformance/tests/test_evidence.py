"""Evidence of the kit's own: counts by a proxy around the primitives, faults that a primitive raises, bounds."""

import pytest

from .kit_reports import LIBRARIES, entry, outcomes

WARM = LIBRARIES
CHOSEN = "--only=G10,G26"
UNCHECKED = {"unprobed": (), "raises": ("G26",), "unspoilt": ("G26",)}


@pytest.mark.conform
@pytest.mark.parametrize("device", UNCHECKED)
def test_what_the_kit_can_see_itself_needs_no_word_of_the_plugin(report, device):
    found = report(f"--device-factory=lesser_queue:{device}", CHOSEN, code=0, examples=1)
    claimed = [one["guarantee"] for one in found["guarantees"] if one.get("claims")]
    assert claimed == list(UNCHECKED[device])
    counted = [how for test, how in outcomes(found, "G10").items() if "what_reached_the_driver" in test]
    assert counted.count("passed") > 10
    if device != "unprobed":
        waited = [how for test, how in outcomes(found, "G26").items() if "raised_by_every_wait" in test]
        assert waited == ["passed"] * len(waited) != []


@pytest.mark.conform
@pytest.mark.parametrize(
    ("device", "name", "liar"),
    [("unprobed", "G10", "WavefrontsCountOnce"), ("hushed", "G26", ""), ("forgiven", "G26", "")],
)
def test_a_claim_that_is_wrong_fails_its_guarantee(report, device, name, liar):
    chosen = [f"--liar={liar}"] if liar else []
    found = report(f"--device-factory=lesser_queue:{device}", f"--only={name}", *chosen, code=1, examples=1)
    assert entry(found, name)["status"] == "failed"
