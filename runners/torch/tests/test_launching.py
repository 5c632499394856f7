"""A step whose parts were captured is one call of the device, and no part of the launch releases the GIL."""

import pytest
from hal_core import Request, SamplingParams
from hal_engine.model.config import parse_config

from tests.lock_wanted import Waiting
from tests.model.conftest import LLAMA, tensors, write

from .served import run, torch_stepper

torch = pytest.importorskip("torch")
from hal_torch.plan import NOTHING, Size  # noqa: E402
from hal_torch.sampling import Want  # noqa: E402
from hal_torch.steps import Feed, Layers, Still, Tell  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

ROOM = Size(64, 256, 4)


class Captured:
    """In place of graphs: executes a step's parts when the launch is over, as a device would."""

    def __init__(self, steps, sizes=(ROOM,)):
        self.sizes, self._steps, self.launches = sizes, steps, []

    def launch(self, parts, stream):
        self.launches.append(parts)
        return True

    def carry_out(self):
        with torch.no_grad():
            for part in self.launches[-1]:
                self._steps.run(part)


class Refused(TorchFunctionMode):
    """No function of torch may be called: each releases the GIL."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"the launch calls {function}")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"), LLAMA, tensors(parse_config(LLAMA)))


def requests():
    return [Request(f"r{n}", [3 + n] * (12 + n), SamplingParams(max_tokens=4 + 3 * n)) for n in range(7)]


def test_a_captured_step_is_one_launch_without_a_call_of_torch(small):
    plain, _ = _served(small, lambda stepper: None)
    launched = []

    def watched(stepper):
        runner, real = stepper.runner, stepper.runner.launch
        runner.graphs = Captured(runner._steps)

        def launch(*given):
            count = len(runner.graphs.launches)
            with Refused():
                step = real(*given)
            assert len(runner.graphs.launches) == count + 1
            runner.graphs.carry_out()
            return step

        runner.launch = launch
        launched.append(runner.graphs.launches)

    answers, _ = _served(small, watched)
    assert {name: one.tokens for name, one in answers.items()} == {name: one.tokens for name, one in plain.items()}
    kinds = {tuple(type(part) for part in parts) for parts in launched[0]}
    assert kinds == {(Feed, Layers, Want, Tell), (Feed, Layers, Still, Tell), (Layers, Want, Tell)}
    assert {parts[-1].turn for parts in launched[0]} == {0, 1, 2}
    assert Layers(NOTHING, True) in {parts[0] for parts in launched[0]}


def test_no_launch_lets_another_thread_in(small):
    """NumPy calls that release the GIL, of any length, would be noticed: prompts have 50 tokens."""
    with torch_stepper(small) as stepper, Waiting() as other:
        runner, real, found = stepper.runner, stepper.runner.launch, []
        runner.graphs = Captured(runner._steps)

        def launch(*given):
            made = []
            found.append(other.gets_in(lambda: made.append(real(*given))))
            runner.graphs.carry_out()
            made[0].late_errors()
            return made[0]

        runner.launch = launch
        run(stepper, [Request(f"r{n}", [3 + n] * 50, SamplingParams(max_tokens=6)) for n in range(6)], chunk=80)
    assert len(found) > 8
    assert found == [""] * len(found)


def _served(small, prepare):
    with torch_stepper(small) as stepper:
        prepare(stepper)
        return run(stepper, requests(), chunk=9)
