"""Stop texts: their bounds, and a search that agrees with the obvious one and reads each character once."""

from types import SimpleNamespace

import pytest
from hal_core import InvalidValue
from hal_engine.cli.run_options import Sampling
from hal_engine.generation.plan import ModelPlan
from hal_engine.model.stops import LONGEST, MOST, StopSearch, checked_stops
from hal_engine.model.streaming import AnswerText
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.text("ab", min_size=1, max_size=6)


def longest_beginning(text, stops):
    """Return how many characters at the end of ``text`` begin a stop text that is longer."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(sizes, default=0)


@given(stops=st.lists(WORDS, min_size=1, max_size=6), pieces=st.lists(st.text("abc", max_size=5), max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_search_finds_what_looking_at_all_texts_finds(stops, pieces):
    search, state, text = StopSearch(stops), 0, ""
    for piece in pieces:
        ends = [at for at in range(1, len(piece) + 1) if (text + piece[:at]).endswith(tuple(stops))]
        for seen in range(len(piece) + 1):
            assert search.advance(state, piece, seen)[1] == next((at for at in ends if at > seen), None)
        state, _ = search.advance(state, piece, len(piece))
        text += piece
        assert search.begun[state] == longest_beginning(text, stops)


@pytest.mark.parametrize("stops", [["x" * LONGEST] * MOST, [f"{'x' * (LONGEST - 2)}{at:02}" for at in range(MOST)]])
@pytest.mark.parametrize("text", ["x" * 3000, ("x" * 255 + "y") * 12, "abc" * 1000])
def test_a_character_costs_two_lookups_whatever_the_stop_texts_are(stops, text):
    class Counted(dict):
        lookups = 0

        def get(self, character):
            Counted.lookups += 1
            return super().get(character)

    search = StopSearch(stops)
    search._next = [Counted(one) for one in search._next]
    state = 0
    for character in text:
        state, _ = search.advance(state, character, 1)
    assert Counted.lookups <= 2 * len(text)


class Growing:
    """A decoder of one character a token; ``held``: what it holds."""

    held = ""

    def push(self, ids):
        return chr(ids[0])

    def finish(self):
        return ""


@pytest.mark.parametrize("stops", [(), ("x" * LONGEST,), tuple(f"{'x' * 250}{at}" for at in range(MOST))])
def test_a_push_reads_new_characters_alone(stops):
    answer, read = AnswerText(Growing(), stops), []
    if stops:
        search = answer._search
        answer._search = SimpleNamespace(
            begun=search.begun, advance=lambda state, text, seen: read.append(len(text)) or search.advance(state, text)
        )
    taken = ""
    for number in range(2000):
        answer.push(ord("ax"[number % 300 > 50]))
        assert sum(map(len, answer._fresh)) <= LONGEST + 1
        taken += answer.take()
        assert taken == "".join(answer._parts)[: answer.settled] if number % 500 == 0 else True
    assert sum(read) == 2000 * bool(stops)
    answer.finish()
    assert taken + answer.take() == answer.text


def test_held_text_that_only_grows_is_read_once():
    class Holding(Growing):
        def push(self, ids):
            self.held += chr(ids[0])
            return ""

    answer, read = AnswerText(Holding(), ["xyz"]), []
    search = answer._search
    answer._search = SimpleNamespace(
        begun=search.begun, advance=lambda *given: read.append(len(given[1])) or search.advance(*given)
    )
    for letter in "abcxxy" * 50:
        assert not answer.push(ord(letter))
    assert sum(read) == 300
    assert answer.push(ord("z"))
    assert answer.text == "abcxxy" * 50 + "z"


TOO_MANY = (["x"] * (MOST + 1), "17 texts", "give at most 16")
TOO_LONG = (["a", "x" * (LONGEST + 1)], "a text of 257 characters", "give at most 256")


@pytest.mark.parametrize(("stops", "what", "cure"), [TOO_MANY, TOO_LONG])
def test_the_bounds_are_named_by_library_and_command_alike(stops, what, cure):
    plan = ModelPlan(None)
    for ask, name in (
        (lambda: checked_stops(stops), "stop"),
        (lambda: plan.answer([], stops, plan.params(None)), "stop"),
        (lambda: Sampling(stop=tuple(stops)), "--stop"),
    ):
        with pytest.raises(InvalidValue) as refused:
            ask()
        assert str(refused.value) == f"{name}: {what} ({cure})"
    checked_stops(["x" * LONGEST] * MOST)


@pytest.mark.parametrize("stop", [[""], "", [1], None, ["\ufffd"]])
def test_what_is_no_text_is_refused(stop):
    with pytest.raises(InvalidValue, match=r"^stop: "):
        checked_stops(stop)
