"""Liars at the sizes of a step: many tokens, stop sequences, end tokens and slots, in the reference, which devices
without a kernel run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hal_core.memory.views import ByteRange

from .rows import Call, How, register, row


def hidden(**fields: Callable[[Any], Any]) -> How:
    """Return a lie that shows a step other values of some fields."""
    return lambda call: call(fields={**call.fields, **{name: of(call.fields[name]) for name, of in fields.items()}})


def long_stops(most: int) -> How:
    """Return a lie about stop sequences of more than ``most`` tokens, which are never met."""
    return hidden(stop_seqs_len=lambda lengths: np.where(lengths > most, 0, lengths))


def first_stops(most: int) -> How:
    """Return a lie about stop sequences, of which the first ``most`` are compared."""
    return hidden(stop_seqs_num=lambda counts: np.minimum(counts, most))


def first_appended(most: int) -> How:
    """Return a lie about the accepted tokens of a step, of which the first ``most`` are appended."""

    def lie(call: Call) -> None:
        call()
        for slot in np.asarray(call.slots).tolist():
            begin, count = int(call.known[slot]), int(call.column["accept_num"][slot])
            call.fields["token_ids"][slot, begin + min(count, most) : begin + count] = -1

    return lie


def warp_of_end_tokens(call: Call) -> object:
    memory, place = call.state.memory, call.state.layout.fields["eos_num"]
    part = ByteRange(place.offset, place.stride * call.state.sizes.num_slots)
    copied = call.me.copy_out(memory, [part], call.stream)
    copied.wait()
    counts = np.array(copied.data[0]).view(np.int32)
    call.write(memory, (part.offset, np.minimum(counts, 32).tobytes()))
    call()
    return call.write(memory, (part.offset, counts.tobytes()))


def first_cleaned(most: int) -> How:
    """Return a lie about the clean-up of a step, which is that of its first ``most`` slots."""
    return lambda call: call(slots=call.slots[:most])


STOPS, SEVERAL = "stop sequences of a step", "several tokens of a step"
STEPS = {
    "a stop sequence may begin in the prompt": row(
        "StopsFromThePrompt", 9, STOPS, lambda call: call(generated=call.total)
    ),  # the comparison does not know where the prompt ends
    "stop sequences of more than 8 tokens are never met": row("ShortStopsOnly", 9, STOPS, long_stops(8)),
    "stop sequences of more than 32 tokens are never met": row("WarpOfStopTokens", 9, STOPS, long_stops(32)),
    "a step compares the first 8 stop sequences": row("EightStopSequences", 9, STOPS, first_stops(8)),
    "a step compares the first 64 stop sequences": row("WavefrontOfStops", 9, STOPS, first_stops(64)),
    "a step compares the first 128 stop sequences": row("BlockOfStops", 9, STOPS, first_stops(128)),
    "a step compares the first 32 end tokens": row("WarpOfEndTokens", 9, "update_inputs", warp_of_end_tokens),
    "of more than 8 accepted tokens the first 8 are appended": row("EightAppended", 9, SEVERAL, first_appended(8)),
    "of more than 32 accepted tokens the first 32 are appended": row("WarpAppended", 9, SEVERAL, first_appended(32)),
    "of more than 64 accepted tokens the first 64 are appended": row("WaveAppended", 9, SEVERAL, first_appended(64)),
    "positions of a step are kept in 16 bits": row(
        "StepPositionsInSixteenBits", 9, "one token of a step", lambda call: call(known=call.known & 0xFFFF)
    ),
    "the clean-up of a step is one block of 1,024 threads, a slot each": row(
        "CleanUpOfOneBlock", 18, "clean-up of a step", first_cleaned(1024)
    ),  # the rest keeps its marks
    "the clean-up of a step leaves out slots from 2,048 on": row(
        "CleanUpOfLowSlots", 18, "clean-up of a step", lambda call: call(slots=call.slots[call.slots < 2048])
    ),  # a bit for each, in a word of fixed length
    "drafts are written for the first 1,024 slots of a call": row(
        "BlockOfDraftedSlots", 12, "plan of drafts", lambda call: call(drafts=dict([*call.drafts.items()][:1024]))
    ),  # one block of threads, a slot each
    "of the drafts of a slot the first 8 are written": row(
        "VectorOfDrafts",
        12,
        "plan of drafts",
        lambda call: call(drafts={slot: given[:8] for slot, given in call.drafts.items()}),
    ),
}
register(__name__, STEPS)
