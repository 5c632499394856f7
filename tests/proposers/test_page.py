"""docs/speculation.md: its example is installed and used unchanged, and the names in it exist."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hal_engine.proposers import Fed, Proposer, contexts, make_proposer, suffix
from hal_engine.proposers.loading import installed

from ..fixtures_plugins.builder import Site
from . import models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    return found


@pytest.fixture
def parrot(tmp_path, monkeypatch):
    """The page's example, installed by the page's commands."""
    project = tomllib.loads(block("toml"))["project"]
    (points,) = project["entry-points"].values()
    site = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))
    module = points["parrot"].partition(":")[0]
    (site.folder / f"{module}.py").write_text(block("python"))
    site.distribution(
        project["name"], version=project["version"], points=project["entry-points"], requires=project["dependencies"]
    )
    return make_proposer("parrot", models.SETUP)


def test_the_example_drafts_as_the_page_says(parrot):
    assert isinstance(parrot.inner.inner, Proposer)
    models.entered(parrot, 0, [3, 4])
    assert parrot.propose({0: 2}) == {0: [4, 4]}
    parrot.observe(Fed([0], [np.array([4, 9])]))
    assert set(parrot.propose({0: 1})[0]) == {9}
    parrot.leave(0, finished=True)
    assert parrot.inner.inner.last == {}


def test_the_page_names_every_proposer_and_the_sizes_there_are():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert named == {"none", *(entry.name for entry in installed())}
    assert f"up to {contexts.DEPTH} tokens" in PAGE
    assert f"at most {suffix.SHARED_TOKENS:,} tokens" in PAGE
