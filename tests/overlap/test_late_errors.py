"""Errors that a step finds on the device alone, and ids that are not tokens: the request's record reports them."""

from dataclasses import replace

import pytest
from hal_core import FinishReason, Request, SamplingParams

from .drawn import Schedule
from .schedules import Player, Watched, sizes_of

pytestmark = pytest.mark.usefixtures("simulator")

FAILS_AT, SLOT = 4, 1


class Failing:
    """A runner whose step number ``FAILS_AT`` stops a slot, as invalid logits would."""

    def __init__(self, runner, device):
        self._runner, self._device = runner, device

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, state, step, stream):
        done = self._runner.launch(state, step, stream)
        if step.step.number != FAILS_AT:
            return replace(done, late_errors=dict)
        self._device.async_set_value(target=state.view("stop_flags")[SLOT], value=True, stream=stream)
        return replace(done, late_errors=lambda: {SLOT: "no use"})


class Astray(Failing):
    """A runner whose step number ``FAILS_AT`` gives a slot an id that is not a token, and continues with it."""

    def launch(self, state, step, stream):
        done = self._runner.launch(state, step, stream)
        if step.step.number == FAILS_AT:
            field = "accept_tokens" if state.speculative else "sampled_token_ids"
            self._device.async_set_value(target=state.view(field)[SLOT], value=-5, stream=stream)
        return done


class Noting(Watched):
    """Records the steps in which a request ended with an error."""

    def take(self, launched):
        record = super().take(launched)
        self.errors = getattr(self, "errors", [])
        over, given = {name for _, name in self.errors}, zip(record.request_ids, record.counts.tolist(), strict=True)
        assert not [name for name, count in given if count and name in over], "tokens are told after an error"
        self.errors += [
            (record.step, name) for name, end in zip(record.request_ids, record.finish, strict=True) if end == 4
        ]
        return record


def played(*, fails, overlap, drafts):
    """Run three requests in two slots; return each end, and the records with an error. ``fails``: the failing runner,
    if any.
    """
    player = Player(
        Schedule(sizes_of(slots=2, drafts=drafts), 12, 8, [], [], None), "lazy", overlap=overlap, stepper=Noting
    )
    player.open()
    if fails is not None:
        player.stepper.runner = fails(player.stepper.runner, player.device)
    for number in range(3):
        player.engine.submit(Request(f"r{number}", [number + 1] * 3, SamplingParams(max_tokens=9)))
    ended = {}
    try:
        for _ in range(60):
            ended |= {one.request_id: one for one in player.engine.step()}
    except BaseException:
        player._leave()
        raise
    assert not player.engine.busy, "who was stopped is waited for"
    errors = player.stepper.errors
    player.close()
    return ended, errors


@pytest.mark.parametrize(
    ("fails", "message"), [(Failing, "no use"), (Astray, "the step gave token -5, outside every vocabulary")]
)
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_steps_own_record_tells_it_and_the_slot_is_used_again(overlap, drafts, fails, message):
    tokens, _ = played(fails=None, overlap=overlap, drafts=drafts)
    ended, errors = played(fails=fails, overlap=overlap, drafts=drafts)
    assert errors == [(FAILS_AT, "r1")]
    assert (ended["r1"].reason, ended["r1"].message) == (FinishReason.ERROR, message)
    given = ended["r1"].token_ids
    assert given == tokens["r1"].token_ids[: len(given)]
    assert 0 < len(given) < 9
    assert [ended[name].token_ids for name in ("r0", "r2")] == [tokens[name].token_ids for name in ("r0", "r2")]
