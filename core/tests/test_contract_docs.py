"""docs/contract.md, the hookspecs and the design agree; each hook is documented in full."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from hal_core.contract import hookspecs
from hal_core.contract.capabilities import HOOKS
from hal_core.handover import KvTransfer

CONTRACT = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
HANDOVER = CONTRACT.partition("## A handover of keys and values\n")[2]


def guarantees(text):
    """Map each guarantee's number to its text, white space and quoting folded."""
    found = re.findall(r"(?:^|- )\*{0,2}(G\d+)\*{0,2}:? (.*?)(?=\n\s*- |\n\s*\n|\Z)", text, re.M | re.S)
    return {number: " ".join(body.replace("`", "").split()) for number, body in found}


def section(hook):
    match = re.search(rf"^## {hook}\(.*?$(.*?)(?=^## |\Z)", CONTRACT, re.M | re.S)
    assert match, f"docs/contract.md has no heading for {hook}"
    return match.group(1)


def test_the_document_says_which_contract_it_is():
    """The core's version in the source tree; an installed one may be older."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"This is contract {pyproject['project']['version'].rpartition('.')[0]}:" in CONTRACT


@pytest.mark.parametrize("hook", HOOKS)
def test_the_heading_is_the_signature(hook):
    names = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"\n## {hook}({names})\n" in CONTRACT


def folded(text):
    """White space, quoting and references folded."""
    return " ".join(re.sub(r":\w+:`~?([\w.]+)`", r"\1", text).replace("`", "").replace("**", "").split())


def arguments(text, pattern):
    """Map each argument, and the return value, to its description."""
    return {name: folded(body) for name, body in re.findall(pattern, text, re.M | re.S)}


def test_the_document_states_what_holds_for_all_hooks():
    docstring, general = inspect.getdoc(hookspecs), CONTRACT.split("## ")[1]
    assert guarantees(general) == guarantees(docstring)
    assert len(guarantees(docstring)) == 3
    (calls,) = re.findall(r"^A step's calls.*?(?=\n\n)", docstring, re.M | re.S)
    assert folded(calls) in folded(general)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_document_states_the_guarantees_of_the_docstring(hook):
    docstring = inspect.getdoc(getattr(hookspecs, hook)).split(":param")[0]
    docstring = re.sub(r":\w+:`~?([\w.]+)`", r"\1", docstring)
    promised, documented = guarantees(docstring), guarantees(section(hook))
    assert documented == promised


@pytest.mark.parametrize("hook", HOOKS)
def test_the_document_says_of_the_arguments_what_the_docstring_says(hook):
    docstring = inspect.getdoc(getattr(hookspecs, hook)).replace(":return:", ":param returns:")
    described = arguments(docstring, r"^:param (\w+): (.*?)(?=^:param|\Z)")
    assert arguments(section(hook), r"^- `(\w+)`: (.*?)(?=^- |\n\n|\Z)") == described
    assert described.keys() == {*inspect.signature(getattr(hookspecs, hook)).parameters, "returns"}


def test_the_document_states_the_guarantees_of_a_transfer():
    docstring = inspect.getdoc(KvTransfer)
    assert guarantees(docstring) == guarantees(HANDOVER)
    assert len(guarantees(docstring)) == 4


def test_every_guarantee_has_one_place():
    numbers = [int(n) for hook in HOOKS for n in re.findall(r"\*\*G(\d+)\*\*", section(hook))]
    numbers += [int(n) for n in re.findall(r"\*\*G(\d+)\*\*", CONTRACT.split("## ")[1])]
    numbers += [int(n) for n in re.findall(r"\*\*G(\d+)\*\*", HANDOVER)]
    assert sorted(numbers) == list(range(1, 33))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_no_defaults_and_no_body(hook):
    spec = getattr(hookspecs, hook)
    parameters = inspect.signature(spec).parameters.values()
    assert all(p.default is p.empty for p in parameters)
    assert 4 <= len(parameters) <= 5
