"""``hal conform NAME --replay FILE``, and ``--against OTHER``: the first difference between two recordings."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from . import frames
from .frames import frames_of, tag_of

if TYPE_CHECKING:
    from ..harness.subject import Subject


def replay(subject: Subject, path: str | Path, calls: int | None = None) -> tuple[int, str]:
    """Replay a recording on a device; return the first call whose effect differs, 0 for none, and a text for the user.

    The calls overlap as they did for the worker. If something differs, they are made again on a new device, and the
    state is compared after each, which names the call.

    :raises InvalidRecording: naming the field, for a file that cannot be replayed.
    """
    from ..kit import Effort, Kit
    from .player import Differs, Player

    path = Path(path)
    for _ in frames_of(path, calls):  # refused before the device is opened
        continue
    found: list[Differs] = []
    for each in (False, True):
        kit = Kit(subject, Effort())
        player = Player(kit, path, calls=calls, each=each)
        try:
            player.run()
        except Differs as wrong:
            found.append(wrong)
        finally:
            kit.renew()
        if not found:
            left = f"; {player.skipped} with values of the device or of other ranks were left out" * bool(
                player.skipped
            )
            told = f"{player.calls} calls, {player.records} records of {player.steps} steps"
            return 0, f"{told}: as the reference model{left} (recorded on {player.recorded_on})"
    call, text = found[-1].args
    alone = "\ncall by call nothing differs: it depends on calls that overlap" * (len(found) == 1)
    return call, f"{text}{alone}"


def difference(first: str | Path, second: str | Path) -> str:
    """Return the first difference between two recordings, their devices left out; "" if they are equal."""
    calls = 0
    for one, other in zip_longest(frames_of(Path(first)), frames_of(Path(second))):
        calls += isinstance(one, frames.Call)
        if not isinstance(one, frames.Header) and one != other:
            told, names = "nothing" if one is None else tag_of(one), getattr(type(one), "__struct_fields__", ())
            if type(one) is not type(other):
                return f"after call {calls}: {told} and {'nothing' if other is None else tag_of(other)}"
            pairs = [(name, repr(getattr(one, name))[:99], repr(getattr(other, name))[:99]) for name in names]
            values = [f"{name} is {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs]
            return f"call {calls}, {told}: {'; '.join(values) or 'values differ'}"
    return ""
