"""The asynchronous example conforms without each optional capability: no test asks for more than is claimed."""

import pytest

from .kit_reports import LIBRARIES

WARM = LIBRARIES
UNCHECKED = {
    "can_hold_stream": {"G3": "can_hold_stream", "G28": "can_hold_stream"},
    "async_d2h": {"G3": "async_d2h", "G28": "async_d2h"},  # tests copy out while a stream is held
    "async_update": {},
    "tensors": {},
}


@pytest.mark.conform
@pytest.mark.parametrize("capability", UNCHECKED)
def test_without_a_capability_all_passes_but_what_needs_it(report, capability):
    found = report(f"--device-factory=lesser_queue:{capability}", code=0, examples=1)
    assert found["ok"]
    assert not found["header"]["capabilities"].get(capability, False)
    notes = {one["guarantee"]: one["note"] for one in found["guarantees"] if one["status"] == "skipped"}
    assert notes.keys() == UNCHECKED[capability].keys()
    assert all(note.endswith(f"needs {UNCHECKED[capability][name]}") for name, note in notes.items())
