"""``hal conform NAME --replay FILE``, and ``--against OTHER``: the first difference between two recordings."""

from __future__ import annotations

from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from .frames import Call, Record, Recording, tag_of

if TYPE_CHECKING:
    from ..harness.subject import Subject


def replay(subject: Subject, path: str | Path, calls: int | None = None) -> tuple[int, str]:
    """Replay a recording on a device; return the first call whose effect differs, 0 for none, and a text for the user.

    The calls overlap as they did for the worker. If something differs, they are made again on a new device, and the
    state is compared after each, which names the call.

    :raises InvalidRecording: naming the field, for a file that cannot be replayed, before the device is opened.
    """
    from ..kit import Effort, Kit
    from .player import Differs, Player

    recording = Recording(Path(path))
    records = {(one.state, one.number): one.body for one in recording.frames(calls) if isinstance(one, Record)}
    found: list[Differs] = []
    for each in (False, True):
        kit = Kit(subject, Effort())
        player = Player(kit, recording.origin, records, each=each)
        try:
            player.run(recording.frames(calls))
        except Differs as wrong:
            found.append(wrong)
        finally:
            kit.renew()
        if not found:
            left = f"; {player.skipped} with values of the device or of other ranks were left out"
            told = f"{player.calls} calls, {len(records)} records of {player.steps} steps: as the reference model"
            return 0, f"{told}{left * bool(player.skipped)} (recorded on {recording.origin})"
    call, text = found[-1].args
    alone = "\ncall by call nothing differs: it depends on calls that overlap" * (len(found) == 1)
    return call, f"{text}{alone}"


def difference(first: str | Path, second: str | Path) -> str:
    """Return the first difference between two recordings, their devices left out; "" if they are equal."""
    calls = 0
    for one, other in zip_longest(Recording(Path(first)).frames(), Recording(Path(second)).frames()):
        calls += isinstance(one, Call)
        if type(one) is not type(other):
            told = ["nothing" if frame is None else tag_of(frame) for frame in (one, other)]
            return f"after call {calls}: {' and '.join(told)}"
        for name in one.__struct_fields__:
            values = [repr(getattr(frame, name)) for frame in (one, other)]
            if values[0] != values[1]:
                begin = max(0, len(commonprefix(values)) - 20)  # noqa: RUF071 (texts, and no paths)
                mine, theirs = ("…" * bool(begin) + value[begin : begin + 99] for value in values)
                return f"call {calls}, {tag_of(one)}: {name} is {mine} and {theirs}"
    return ""
