"""On the workers of a split, a slot and blocks are promised once the last step that reads them was taken: another
stream fills the blocks, and is not ordered behind the steps (G30).
"""

from functools import partial

import numpy as np
import pytest
from hal_core import FinishReason, OutputRecord, Request, SamplingParams, SlotStatus, StateConfig, admit, lay_out
from hal_engine.engine.roles import DecodeScheduler


def record_of(number, *rows):
    """A step's record: of each row its name, its token, and the reason of its end."""
    names, tokens, ends = zip(*rows, strict=True) if rows else ((), (), ())
    ones, none = np.ones(len(rows), np.int32), np.zeros(len(rows), np.bool_)
    status, positions = np.full(len(rows), SlotStatus.TOKEN, np.uint8), np.ones(len(rows), np.int64)
    return OutputRecord(
        number, names, status, np.array(ends, np.uint8), positions, ones, np.array(tokens, np.int64), none
    )


@pytest.mark.parametrize("end", [FinishReason.LENGTH, FinishReason.STOP])
def test_nothing_is_promised_that_a_step_under_way_reads(end):
    layout = lay_out(StateConfig(num_slots=1, max_model_len=16, block_size=4, max_eos=1))
    scheduler = DecodeScheduler(layout, 4, admit=partial(admit, layout=layout), overlap=True)
    most = 2 if end is FinishReason.LENGTH else 9
    former, later = (Request(name, [1], SamplingParams(max_tokens=most, eos_token_ids=(5,))) for name in ("a", "b"))
    assert scheduler.reserve(former, 0)
    scheduler.insert(("a", 0), 3, ())
    scheduler.schedule()
    assert not scheduler.has_place(later), "the step ends it, and is under way"
    scheduler.schedule()
    (ended,) = scheduler.update(record_of(0, ("a", 5, end)))
    assert ended.token_ids == (3, 5)
    assert scheduler.reserve(later, 0) is None, "the next step has it too"
    scheduler.update(record_of(1))
    assert scheduler.reserve(later, 0)
