"""Options of a run of the kit, and their translation to a pytest run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """Options of a run; the fields are the options of the command."""

    device: str = ""
    device_factory: str = ""
    target: str = ""
    policy: str = ""
    liar: str = ""
    fault: str = ""
    fields: str = ""
    only: str = ""
    profile: str = ""
    examples: int = 0
    seed: int | None = None
    shrink: bool = True
    hang: float = 0.0
    json: bool = False
    html: str = ""
    liars: bool = False
    report: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    replay: str = ""

    @property
    def targets(self) -> list[str]:
        """The files for the report."""
        return [*self.report, *filter(None, [self.html])]

    def but(self, **changes: Any) -> Options:  # noqa: ANN401 (fields of this class)
        """Return the same with some changes."""
        return replace(self, **changes)


def arguments(options: Options) -> list[str]:
    """Return the arguments of the pytest run, which writes no report. It reads no settings of the folder it is started
    in."""
    chosen = [
        *("--pyargs", "hal_conformance", "-p", "hal_conformance.plugin", "-p", "no:cacheprovider"),
        *("-c", str(HERE / "conform.ini"), "--rootdir", str(HERE)),
        *("--import-mode=importlib", "-W", "default", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
    ]
    for flag, value in (
        ("--hal-device", options.device),
        ("--hal-device-factory", options.device_factory),
        ("--hal-target", options.target),
        ("--hal-policy", options.policy),
        ("--hal-liar", options.liar),
        ("--hal-fault", options.fault),
        ("--hal-fields", options.fields),
        ("--hal-only", options.only),
        ("--hal-profile", options.profile),
        ("--hal-examples", options.examples),
        ("--hal-seed", options.seed),
        ("--hal-hang", options.hang),
        *(("--hal-skip", name) for name in options.skip),
    ):
        if value not in ("", None) and not (value == 0 and flag in ("--hal-examples", "--hal-hang")):
            chosen.append(f"{flag}={value}")
    # :mod:`.apart` has the stacks of a crash, and leaves out what a callback loses of an interrupt
    chosen += ["-p", "no:faulthandler", "-p", "no:unraisableexception"]
    return chosen if options.shrink else [*chosen, "--hal-no-shrink"]
