"""The process of a rank: how it ends, and how long that may take."""

import pytest
from hal_core import GroupLost, InvalidValue
from hal_engine.distributed import process


@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [(None, 0, 60), (GroupLost("gone"), process.LOST, 2), (InvalidValue("no"), process.REFUSED, 2)],
    ids=["well", "lost", "refused"],
)
def test_a_rank_whose_run_went_well_has_a_minute_to_end(monkeypatch, capsys, error, status, seconds):
    """On a busy host it took more than five seconds, the alarm ended it, and its run counted as lost."""
    alarms = []

    def serve(*_, **__):
        if error is not None:
            raise error

    for name, value in {
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_TRAINERS_NUM": "1",
        process.URL: "u",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr(process.signal, "alarm", alarms.append)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    assert process.main() == status
    assert alarms == [seconds]
    assert bool(capsys.readouterr().err) == bool(status)
