"""The seams that liars name: each leads somewhere, and no liar names a module of the core by its path."""

import re
from pathlib import Path

import pytest
from hal_conformance import liars
from hal_conformance.liars.core_seams import SEAMS, find, put
from hal_core.errors import InvalidValue


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_leads_to_a_function_and_what_is_put_there_is_taken_back(seam):
    owner, name, true = find(seam)
    assert callable(getattr(owner, name))
    undo = put(seam, lambda _: len)
    assert getattr(owner, name) is len
    undo()
    assert find(seam) == (owner, name, true)


def test_an_unknown_seam_is_told_with_those_there_are():
    with pytest.raises(InvalidValue, match=r"no seam 'the moon'.*'check of a batch'"):
        find("the moon")


def test_liars_name_seams_and_no_module_of_the_core():
    patches = [one for one in liars.everyone() if issubclass(one.how, liars.Patch)]
    assert len(patches) >= 10
    assert {one.how.seam for one in patches} <= SEAMS.keys()
    for path in Path(liars.__file__).parent.glob("*.py"):
        assert not re.search(r"hal_core(\.\w+)*:\w", path.read_text(encoding="utf-8")), path.name
