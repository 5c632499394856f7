"""Stop texts: their bounds, and a search whose time does not depend on their number and length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from hal_core import InvalidValue

MOST, LONGEST = 16, 256
"""Most stop texts of a request, and most characters of each."""


def checked_stops(given: object, argument: str = "stop") -> tuple[str, ...]:
    """Return a text, or a list of texts, as a tuple. Raises :class:`InvalidValue` that names ``argument``."""
    texts = tuple(given) if isinstance(given, list | tuple) else (given,)
    if len(texts) > MOST:
        raise InvalidValue(f"{len(texts)} texts", cure=f"give at most {MOST}", argument=argument)
    for one in texts:
        if not isinstance(one, str) or not one:
            what, cure = ("an empty text", "leave it out") if one == "" else (f"{one!r:.200}", "give texts")
            raise InvalidValue(what, cure=cure, argument=argument)
        if "\ufffd" in one:
            what, cure = "U+FFFD stands for bytes that are no text", "give the text without it"
            raise InvalidValue(what, cure=cure, argument=argument)
        if len(one) > LONGEST:
            what = f"a text of {len(one)} characters"
            raise InvalidValue(what, cure=f"give at most {LONGEST}", argument=argument)
    return texts


class StopSearch:
    """Aho-Corasick automaton over the characters of some texts (Aho and Corasick, 1975).

    A state is the longest end of the text so far that begins one of the stop texts; state 0 is the empty one. The
    caller keeps the state, so one automaton serves all answers of a request. A character costs two lookups on average,
    whatever the stop texts are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail, self._ends = [0], [False]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if (found := self._next[state].get(character)) is None:
                    found = self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._ends.append(False)
                    depth.append(depth[state] + 1)
                state = found
            self._ends[state] = True
        self.begun = [depth[state] if self._next[state] else 0 for state in range(len(depth))]
        """By state: how many characters at the end of the text begin a stop text that is longer than they are."""
        self._link()

    def _link(self) -> None:
        """Set where each state continues when a character does not fit, shorter ends before longer ones."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._fail[state]
            self._ends[state] = self._ends[state] or self._ends[shorter]
            self.begun[state] = self.begun[state] or self.begun[shorter]
            for character, child in self._next[state].items():
                self._fail[child] = self._step(shorter, character)
                waiting.append(child)

    def _step(self, state: int, character: str) -> int:
        while (found := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fail[state]
        return found

    def advance(self, state: int, text: str, seen: int = 0) -> tuple[int, int | None]:
        """Read ``text`` from a state on. Return the state behind it, and how many of its characters there are up to the
        first end of a stop text behind its first ``seen`` characters; None without one. The reading ends there."""
        step, ends = self._step, self._ends
        for at, character in enumerate(text):
            state = step(state, character)
            if ends[state] and at >= seen:
                return state, at + 1
        return state, None


@lru_cache(maxsize=8)
def search_of(stops: tuple[str, ...]) -> StopSearch:
    """Return the automaton of these texts, one for all answers of a request: 16 of 256 characters take about 5 ms."""
    return StopSearch(stops)
