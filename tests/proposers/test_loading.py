"""Proposers from entry points: only the named one is imported, and errors name its distribution."""

import sys

import pytest
from hal_core import ContractMismatch, InvalidValue, PluginError
from hal_engine.proposers import Proposer, Setup, make_proposer
from hal_engine.proposers.hybrid import Hybrid
from hal_engine.proposers.loading import installed

from . import models

CODE = """
class Parrot:
    wants_hidden = False

    def __init__(self, setup):
        self.setup, self.last = setup, {}

    def enter(self, slot, request, tokens):
        self.last[slot] = int(tokens[-1])

    def observe(self, fed):
        self.last.update({slot: int(given[-1]) for slot, given in zip(fed.slots, fed.accepted) if len(given)})

    def propose(self, room):
        return {slot: [self.last[slot]] * most for slot, most in room.items()}

    def leave(self, slot, *, finished):
        self.last.pop(slot, None)

    def close(self):
        pass

def made(setup):
    return Parrot(setup)

class Mute:
    wants_hidden = None

    def __init__(self, setup):
        pass

    def enter(self, slot, request, tokens):
        pass

class Fails:
    def __init__(self, setup):
        raise OSError("the disk is full")

text = "no class"
"""


@pytest.fixture
def proposers(parts):
    """Installs a distribution with proposers beside the real ones: ``proposers(name=target, …)``."""
    return lambda distribution="acme-parrot", requires=None, **points: parts(
        CODE, distribution, {"hal.proposers": points}, requires
    )


def test_what_comes_with_hal_is_declared_like_any_other():
    assert {"naive", "ngram", "suffix", "hybrid"} <= {entry.name for entry in installed()}
    assert {entry.distribution for entry in installed()} == {"paddle-hal-engine"}


@pytest.mark.parametrize("target", ["Parrot", "made"])
def test_one_that_is_named_is_made_for_its_setup(proposers, target):
    proposers(parrot=target)
    proposer = make_proposer("parrot", models.SETUP)
    assert isinstance(proposer, Proposer)
    assert proposer.inner.inner.setup is models.SETUP
    models.entered(proposer, 2, [4, 5])
    assert proposer.propose({2: 2}) == {2: [5, 5]}


def test_no_proposer_is_none():
    assert make_proposer("none", models.SETUP) is None


def test_only_what_is_named_is_imported(proposers):
    module, other = proposers(parrot="Parrot"), proposers("other-parrot", polly="Parrot")
    assert {"parrot", "polly"} <= {entry.name for entry in installed()}
    assert not {module, other} & sys.modules.keys()
    make_proposer("parrot", models.SETUP)
    assert {module, other} & sys.modules.keys() == {module}


def test_two_names_are_a_hybrid_of_which_the_second_must_look_tokens_up(proposers):
    proposers(parrot="Parrot")
    assert isinstance(make_proposer("parrot+ngram", models.SETUP).inner, Hybrid)
    with pytest.raises(InvalidValue, match="parrot cannot go on from another's drafts") as caught:
        make_proposer("ngram+parrot", models.SETUP)
    assert "ngram or suffix, behind the +" in caught.value.cure


@pytest.mark.parametrize("name", ["parot", "", "ngram+", "none+ngram"])
def test_a_name_that_nobody_has_is_an_error_that_lists_those_there_are(proposers, name):
    proposers(parrot="Parrot")
    with pytest.raises(InvalidValue, match=r"parrot \(acme-parrot 1\.0\)") as caught:
        make_proposer(name, models.SETUP)
    assert caught.value.argument == "--speculate"
    assert "ngram (paddle-hal" in caught.value.what


def test_a_name_that_two_have_is_an_error_that_names_both(proposers):
    for distribution in ("acme-parrot", "other-parrot"):
        proposers(distribution, parrot="Parrot")
    with pytest.raises(InvalidValue, match=r"acme-parrot 1\.0 and other-parrot 1\.0"):
        make_proposer("parrot", models.SETUP)


@pytest.mark.parametrize(
    ("target", "requires", "kind", "says"),
    [
        ("Nobody", None, PluginError, "importing .*Nobody failed"),
        ("Fails", None, PluginError, "was not made: OSError: the disk is full"),
        ("text", None, PluginError, "is no class and no function"),
        ("Mute", None, PluginError, "made Mute, which has no close, leave, observe, propose, wants_hidden"),
        ("Parrot", ["paddle-hal-core>=9.0,<10"], ContractMismatch, "made for contract"),
    ],
)
def test_one_that_cannot_be_used_is_named_with_its_distribution(proposers, target, requires, kind, says):
    proposers(requires=requires, parrot=target)
    with pytest.raises(kind, match=says) as caught:
        make_proposer("parrot", models.SETUP)
    assert "acme-parrot 1.0" in str(caught.value)
    assert caught.value.cure


def test_no_drafts_at_all_are_refused():
    with pytest.raises(InvalidValue, match="0 drafts") as caught:
        make_proposer("ngram", Setup(0, 1, 8, 8))
    assert caught.value.argument == "--drafts"
