"""Invalid options of the kit: refused before anything runs."""

import sys

import pytest
from hal_conformance import liars
from hal_conformance.report.command import main
from hal_conformance.report.options import Options, arguments
from hal_conformance.report.report import chosen
from hal_core.errors import InvalidValue

from .kit_reports import HERE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy=nomod:x"], "--policy: 'nomod:x': importing nomod failed: ModuleNotFoundError"),
        (["--policy=os:nosuch"], "--policy: 'os:nosuch': module 'os' has no attribute 'nosuch' (mend the name)"),
        (["--policy=os:sep"], "--policy: 'os:sep' is not a Policy, but str (name a class"),
        (["--policy=argparse:Action"], "--policy: 'argparse:Action' was not made: TypeError"),
        (["--policy=os"], "--policy: 'os' names no attribute (write module:attribute)"),
        (["--policy=:x"], "--policy: ':x' names no attribute"),
        (["--device-factory=os:nosuch"], "--device-factory: 'os:nosuch': module 'os' has no attribute 'nosuch'"),
        (["--device-factory=os:sep"], "--device-factory: 'os:sep' cannot be called (name a function"),
        (["--device-factory=kit_devices:wrong_support"], "has a support that is none (its attribute support is"),
        (["--liar=NoRowRest"], "--liar: no liar 'NoRowRest' (did you mean NoRowReset?)"),
        (["--liar=xyz"], "--liar: no liar 'xyz' (hal conform cpu --liars lists them; one of your own is MODULE:CLASS)"),
        (["--liar=nomod:X"], "--liar: 'nomod:X': importing nomod failed: ModuleNotFoundError"),
        (["--liar=own_liars:X"], "--liar: 'own_liars:X': module 'own_liars' has no attribute 'X' (mend the name)"),
        (["--liar=own_liars:NotRegistered"], "'own_liars:NotRegistered' is no liar (register the class with"),
        (["--fault=NoSuchFault"], "no fault 'NoSuchFault' (one of FailingWrites"),
        (
            ["--html=/nonexist/x.html"],
            "--html: '/nonexist/x.html' cannot be written: the folder '/nonexist' does not exist",
        ),
        (["--report=/nonexist/x.json"], "--report: '/nonexist/x.json' cannot be written: the folder '/nonexist' does"),
        (["--report=/"], "--report: '/' is a folder (name a file"),
        ([f"--report=/{'x' * 300}"], "cannot be written: File name too long"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_option_that_cannot_be_is_told_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "own_liars", raising=False)
    monkeypatch.setattr(liars, "LIARS", [*liars.LIARS])
    with pytest.raises(InvalidValue) as refused:
        main(["cpu", *arguments])
    assert message in str(refused.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argument", ["--examples=0", "--examples=-3", "--examples=x", "--seed=-1", "--seed=1.5"])
def test_a_count_that_cannot_be_is_a_usage_error(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cpu", argument])
    assert stop.value.code == 2
    option, _, text = argument.partition("=")
    assert f"argument {option}: {text!r} is not a whole number of at least" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_hang_that_cannot_be_is_a_usage_error(text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["cpu", f"--hang={text}"])
    assert stop.value.code == 2
    assert f"argument --hang: {text!r} are not seconds above 0" in capsys.readouterr().err


def test_guarantees_may_be_given_as_ranges():
    assert chosen("G18-G20,3 G32") == {3, 18, 19, 20, 32}


def test_a_hang_reaches_the_tests():
    assert "--hal-hang=0.5" in arguments(Options(device="cpu", hang=0.5))


@pytest.mark.parametrize("base", [liars.Lie, liars.Patch])
def test_a_liars_own_init_is_refused_as_it_is_never_called(base):
    made = type("Mine", (base,), {"__init__": lambda self: None})
    with pytest.raises(InvalidValue, match=r"the __init__ of the liar Mine is never called.*override laid\(self\)"):
        liars.liar(1, "a story")(made)


def test_a_class_of_no_kind_of_liar_is_refused():
    with pytest.raises(InvalidValue, match=r"the liar Mine is of no kind \(derive it from Lie, Patch or Policy"):
        liars.liar(1, "a story")(type("Mine", (), {}))
