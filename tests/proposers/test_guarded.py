"""Invalid values and errors of a plugin's proposer end in an error that names it, never in a later one elsewhere."""

import sys

import numpy as np
import pytest
from hal_core import GroupLost, PluginError
from hal_engine.proposers import Drawn, Setup, loading, make_proposer
from hal_engine.proposers.host import Guess
from hal_engine.proposers.naive import Naive
from hal_engine.steppers import closed_at_end

from hal.cli import main
from hal.discovery import PROPOSERS, Entry

from ..fixtures_plugins.builder import Site
from . import models

SETUP = Setup(max_draft_tokens=3, num_slots=4, max_model_len=64, vocab_size=10)
WEIGHTS = np.ones(10, np.int64)


class Plugin(Naive):
    """Returns its given value, or raises it if it is an exception; the named method does the same."""

    def __init__(self, answer, method="propose"):
        self.answer, self.method = answer, method
        for name in ("enter", "observe", "propose", "leave", "close", "guess"):
            setattr(self, name, lambda *a, name=name, **k: self._give() if name == method else {})

    def _give(self):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def made(monkeypatch):
    """Make the proposer that ``hal run`` makes, as if a distribution had brought it."""
    entry = Entry("parrot", "acme-parrot", "1.0", "acme_parrot:Parrot", group=PROPOSERS)

    def make(plugin, name="parrot"):
        there = loading.installed()
        monkeypatch.setattr(loading, "installed", lambda: (*there, entry))
        found = loading.load_and_make
        monkeypatch.setattr(loading, "load_and_make", lambda one, setup: plugin if one is entry else found(one, setup))
        proposer = make_proposer(name, SETUP)
        models.entered(proposer, 0, [4, 5, 6])
        models.entered(proposer, 2, [1, 2])
        return proposer

    return make


def named(error, says):
    told = str(error.value)
    assert says in told
    assert "acme-parrot 1.0: proposer parrot: " in told
    assert "reinstall or update acme-parrot, or name another one with --speculate" in told
    assert "\n" not in told


class Unprintable:
    def __repr__(self):
        raise OSError


BAD = {
    "None": (None, "propose gave None, and not a dict"),
    "a list": ([[1]], "propose gave list [[1]], and not a dict"),
    "a value that cannot be shown": (Unprintable(), "propose gave Unprintable"),
    "an iterator of pairs": (iter({0: [1]}.items()), "dict_itemiterator"),
    "None for a slot": ({0: None}, "gave None for slot 0, and not a list"),
    "an iterator for a slot": ({0: iter([1])}, "list_iterator"),
    "text for a slot": ({0: "12"}, "gave str '12' for slot 0"),
    "bytes for a slot": ({0: b"12"}, "gave bytes b'12' for slot 0"),
    "a number for a slot": ({0: 1}, "gave int 1 for slot 0"),
    "a slot that runs nothing": ({1: [1]}, "drafts for slot 1, which has no room"),
    "a slot that is not there": ({99: []}, "drafts for slot 99, which has no room"),
    "a slot before the first": ({-1: [1]}, "drafts for slot -1"),
    "a slot by a text": ({"0": [1]}, "gave str '0' as the slot"),
    "a slot by True": ({False: [1]}, "gave bool False as the slot"),
    "a float": ({0: [1.0]}, "gave float 1.0 as the draft for slot 0, which is no whole number"),
    "a float of numpy": ({0: np.array([1.0])}, "as the draft for slot 0, which is no whole number"),
    "a text in the list": ({0: ["1"]}, "gave str '1' as the draft"),
    "a bool": ({0: [True]}, "gave bool True as the draft"),
    "None in the list": ({0: [None]}, "gave None as the draft"),
    "rows": ({0: np.ones((2, 2), np.int64)}, "as the draft for slot 0"),
    "a scalar array": ({0: np.array(1)}, "propose failed: TypeError"),
    "a negative token": ({0: [1, -1]}, "gave int -1 for slot 0, and tokens go from 0 to 9"),
    "a token behind the last": ({0: [10]}, "gave int 10 for slot 0"),
    "a token beyond 64 bits": ({0: [2**70]}, "for slot 0, and tokens go from 0 to 9"),
    "too many": ({0: [1, 1, 1, 1]}, "gave 4 drafts for slot 0, which has room for"),
    "weights of fewer": ({0: Drawn([1], [])}, "0 weights for 1 drafts for slot 0"),
    "weights of others": ({0: Drawn([1], [WEIGHTS[:5]])}, "no int64 [10]"),
    "weights of a float": ({0: Drawn([1], [WEIGHTS / 2])}, "no int64 [10]"),
    "weights of 0": ({0: Drawn([1], [WEIGHTS * 0])}, "the draft 1 cannot have been drawn"),
    "weights below 0": ({0: Drawn([1], [np.array([-1, 2] + [0] * 8)])}, "cannot have been drawn"),
    "an error": (KeyError(7), "propose failed: KeyError: 7"),
    "an error of more lines": (ValueError("a\nb"), "propose failed: ValueError: a b"),
    "an exit": (SystemExit(0), "propose failed: SystemExit: 0"),
}


@pytest.mark.parametrize(("answer", "says"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["parrot", "parrot+ngram"])
def test_a_bad_answer_is_an_error_that_names_the_proposer(made, name, answer, says):
    proposer = made(Plugin(answer), name)
    with pytest.raises(PluginError) as caught:
        proposer.propose({0: 3, 2: 2})
    named(caught, says)


@pytest.mark.parametrize("answer", [[1, 2], (1, 2), np.array([1, 2], np.int32), [np.int64(1), np.uint8(2)]])
def test_whole_numbers_of_any_kind_are_handed_on_as_ints(made, answer):
    proposer = made(Plugin({np.int64(0): answer}))
    drafts = proposer.propose({0: 3})
    assert drafts == {0: [1, 2]}
    assert {type(value) for value in (*drafts, *drafts[0])} == {int}


def test_what_drafts_were_drawn_from_is_handed_on(made):
    drafts = made(Plugin({0: Drawn([1], [WEIGHTS])})).propose({0: 3})
    assert isinstance(drafts[0], Drawn)
    assert drafts[0].weights[0] is WEIGHTS


CALLS = {
    "observe": lambda proposer: proposer.observe(models.fed(s0=[1])),
    "leave": lambda proposer: proposer.leave(0, finished=True),
    "close": lambda proposer: proposer.close(),
    "enter": lambda proposer: models.entered(proposer, 1, [1]),
}


@pytest.mark.parametrize("method", CALLS)
def test_an_error_of_any_method_names_the_proposer(made, method):
    plugin = Plugin(None, method)
    proposer = made(plugin)
    plugin.answer = OSError("the disk is full")
    with pytest.raises(PluginError) as caught:
        CALLS[method](proposer)
    named(caught, f"{method} failed: OSError: the disk is full")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GroupLost("rank 1 is gone")])
def test_what_is_no_fault_of_the_plugin_goes_through(made, error):
    proposer = made(Plugin(error() if isinstance(error, type) else error))
    with pytest.raises(error if isinstance(error, type) else GroupLost):
        proposer.propose({0: 1})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "guess gave None"),
        (Guess([1, 2, 3, 4], 5), "guess gave 4 drafts, which has room for 3"),
        (Guess([10], 5), "guess gave int 10"),
        (Guess([1], None), "gave None as matched"),
        (KeyError(0), "guess failed: KeyError: 0"),
    ],
)
def test_one_that_goes_on_behind_another_is_checked_too(made, answer, says):
    proposer = made(Plugin(answer, "guess"), "ngram+parrot")
    with pytest.raises(PluginError) as caught:
        proposer.propose({0: 3})
    named(caught, says)


@pytest.mark.parametrize("cost", ["much", None, -1.0, float("nan"), True])
def test_a_cost_that_is_none_is_an_error_too(made, cost):
    plugin = Plugin({})
    plugin.draft_cost = cost
    with pytest.raises(PluginError) as caught:
        made(plugin)
    named(caught, "draft_cost gave")


def test_an_error_of_closing_hides_none_that_came_before(made):
    proposer = made(Plugin(OSError("full"), "close"))
    with pytest.raises(ValueError, match="first") as caught, closed_at_end(proposer):
        raise ValueError("first")
    assert "close failed: OSError: full" in caught.value.__notes__[0]
    with pytest.raises(PluginError, match="close failed"), closed_at_end(proposer):
        pass


CODE = """
from hal_engine.proposers.naive import Naive

class Parrot(Naive):
    def propose(self, room):
        return {slot: None for slot in room}

def gone(setup):
    raise SystemExit(0)
"""


@pytest.mark.parametrize(
    ("target", "says", "options"),
    [
        ("Parrot", "propose gave None for slot 0", ()),
        ("gone", "was not made", ()),
        pytest.param(  # three processes that import Paddle; it would only fail again
            "Parrot", "propose gave None for slot 0", ("--tp", "2", "--restart", "1"), marks=pytest.mark.conform
        ),
    ],
    ids=["a bad answer", "an exit", "on ranks"],
)
def test_hal_run_names_it_in_one_line(tmp_path, tmp_path_factory, monkeypatch, capsys, target, says, options):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("ipc")))
    site, module = Site(tmp_path / "site"), f"acme_{target.lower()}_{len(options)}"
    monkeypatch.syspath_prepend(str(site.folder))
    monkeypatch.setenv("PYTHONPATH", str(site.folder))  # of ranks
    (site.folder / f"{module}.py").write_text(CODE)
    site.distribution("acme-parrot", points={PROPOSERS: {"parrot": f"{module}:{target}"}})
    with pytest.raises(SystemExit) as end:
        main(
            [
                "run",
                "--device",
                "cpu",
                "--prompt",
                "a b a b",
                "--speculate",
                "parrot",
                "--temperature=0",
                "--max-tokens",
                "4",
                *options,
            ]
        )
    sys.modules.pop(module, None)
    told = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    (line,) = {line for line in told if says in line and not line.startswith("hal: step ")}
    assert "acme-parrot 1.0: proposer parrot: " in line
    assert "--restart" not in line
    assert not any("Traceback" in line for line in told)
