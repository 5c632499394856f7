"""Runners from entry points: which one runs, valid names, and the choice in the closing line."""

from types import SimpleNamespace

import pytest
from hal_core import ContractMismatch, InvalidValue, PluginError
from hal_engine.stepping import AUTO, DEFAULT, check_runner_name, choose_runner, make_runner

import hal

CODE = """
class Idle:
    needs_host, vocab_size, note, supports = "", 5, "", ()

    def __init__(self, setup):
        self.setup = setup

    def check(self, request): ...
    def propose(self, state, step, stream): ...
    def launch(self, state, step, stream): ...

class Refuses(Idle):
    @staticmethod
    def why_not(device, model):
        return f"{device.name} is too small"

class Able(Idle):
    @staticmethod
    def why_not(device, model):
        return ""
"""
DEVICE = SimpleNamespace(name="acme:0")


@pytest.fixture
def runners(parts):
    """Install a distribution with runners: ``runners(name=target, …)``; ``device``: what auto takes ``first`` for."""

    def install(distribution="acme-runner", device="", requires=None, **points):
        parts(CODE, distribution, {"hal.runners": points}, requires, {device: next(iter(points))} if device else {})

    return install


def test_an_installed_runner_is_made_by_its_name(runners):
    runners(fast="Idle")
    check_runner_name("fast")
    assert make_runner("fast", "a setup").setup == "a setup"


@pytest.mark.parametrize("name", ["fats", "", "Fast"])
def test_an_unknown_runner_is_refused_with_those_installed(runners, name):
    runners(fast="Idle")
    with pytest.raises(InvalidValue, match=r"no installed runner is called .*fast \(acme-runner 1\.0\)") as caught:
        check_runner_name(name)
    assert caught.value.argument == "--runner"
    assert "auto, paddle, or MODULE:NAME" in caught.value.cure


def test_a_runner_of_two_distributions_is_refused_with_both(runners):
    for distribution in ("acme-runner", "other-runner"):
        runners(distribution, fast="Idle")
    with pytest.raises(InvalidValue, match=r"acme-runner 1\.0 and other-runner 1\.0") as caught:
        check_runner_name("fast")
    assert caught.value.cure == "uninstall one of them"


@pytest.mark.parametrize(
    ("target", "requires", "kind", "says"),
    [
        ("Idle", ("paddle-hal-core>=7,<8",), ContractMismatch, "acme-runner 1"),
        ("Nobody", None, PluginError, r"acme-runner 1\.0: runner fast: importing .*:Nobody failed"),
    ],
)
def test_a_runner_that_cannot_be_used_is_named_with_its_distribution(runners, target, requires, kind, says):
    runners(fast=target, requires=requires)
    with pytest.raises(kind, match=says):
        make_runner("fast", None)


@pytest.mark.parametrize(
    ("target", "chosen", "why"),
    [
        ("Able", "fast", ""),
        ("Idle", "fast", ""),
        ("Refuses", DEFAULT, "runner fast cannot run here: acme:0 is too small"),
    ],
)
def test_auto_takes_the_devices_runner_where_it_can_run(runners, tmp_path, target, chosen, why):
    runners(device="acme", fast=target)
    assert choose_runner(AUTO, DEVICE, tmp_path) == (chosen, why)
    assert choose_runner(DEFAULT, DEVICE, tmp_path) == (DEFAULT, "")
    assert choose_runner("fast", DEVICE, tmp_path) == ("fast", "")


def test_auto_takes_the_paddle_model_for_another_device(runners, tmp_path):
    runners(device="other", fast="Able")
    assert choose_runner(AUTO, DEVICE, tmp_path) == (DEFAULT, "no installed runner is for device acme")


def test_auto_refuses_two_runners_for_one_device(runners, tmp_path):
    for distribution in ("acme-runner", "other-runner"):
        runners(distribution, device="acme", **{distribution.partition("-")[0]: "Able"})
    with pytest.raises(InvalidValue, match=r"the runner for device 'acme' is provided by acme-runner 1\.0 and other"):
        choose_runner(AUTO, DEVICE, tmp_path)


@pytest.mark.usefixtures("private_folders")
class TestCommand:
    """``hal run``."""

    @pytest.fixture
    def run(self, command):
        def call(*arguments):
            options = ("--json", "--prompt", "def main(", "--temperature=0", "--max-tokens", "2")
            done = command("run", *options, *arguments)
            return done.status, done.answers, done.err.splitlines()

        return call

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("--runner", "nowhere"), "--runner: no installed runner is called 'nowhere'; installed: "),
            (("--runner", "paddle", "--runner", "auto"), "--runner: paddle and auto (name one runner)"),
            (("--dtype", "int8"), "--dtype: 'int8' (give auto or float32)"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, run, arguments, says):
        code, objects, lines = run("--device", "cpu", *arguments)
        assert (code, objects, len(lines)) == (2, [], 1)
        assert says in lines[0]

    @pytest.mark.parametrize("way", ["run", "generate"])
    def test_a_proposer_is_refused_where_a_runner_runs_by_default(self, runners, run, way):
        """It would be the Paddle model that runs, for which the device may be of no use."""
        runners(device="cpu", fast="Able")
        if way == "run":
            code, objects, lines = run("--device", "cpu", "--speculate", "ngram")
            assert (code, objects, len(lines)) == (2, [], 1)
        else:
            with pytest.raises(InvalidValue) as caught:
                hal.generate("def main(", max_tokens=2, device="cpu", speculate="ngram")
            lines = [str(caught.value)]
        assert "ngram drafts beside the Paddle model, and runner fast runs on this device" in lines[0]
        assert "drafts K" in lines[0]

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ((), "runner paddle, as no installed runner is for device cpu"),
            (("--speculate", "ngram"), "runner paddle, as ngram drafts beside it"),
            (("--runner", "paddle"), ""),
        ],
    )
    def test_a_note_says_why_the_paddle_model_runs(self, run, arguments, why):
        code, _, (*lines, line) = run("--device", "cpu", "-v", *arguments)
        assert code == 0
        assert [one.partition("hal: ")[2] for one in lines if "runner paddle," in one] == [why] * bool(why)
        assert sum("runner paddle: " in one for one in lines) == 1, "how it computes"
        assert line.endswith(" tokens/s), device cpu:0, model on cpu")
