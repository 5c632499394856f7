"""Options of an engine: one field each, with its help, its panel and its checks.

The parameters of ``hal run`` and ``hal serve``, the keywords of ``hal.AsyncEngine`` and ``hal.generate``, and the
settings that an engine process and ranks are sent are these fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
from hal_core import HalError, InvalidValue, SamplingParams, StateConfig, Unavailable

from hal_engine.object_loader import check_maker
from hal_engine.proposers import NONE
from hal_engine.proposers.checks import (
    MOST_DRAFTS,
    REJECTION,
    USUAL_DRAFTS,
    check_acceptance,
    check_drafts_count,
    most_drafts,
    no_drafts,
    refused_with_runner,
)
from hal_engine.stepping import AUTO, DEFAULT, check_dtype, check_overlap, check_runner_name

CHECK_RANKS = "HAL_CHECK_RANKS"
"""Variable with which ranks compare their states after each step."""
MODEL_PLACE = "cpu"
"""Default place of the Paddle model."""
LAUNCHERS, SAMPLERS = ("local", "ray"), ("first", "every-rank")
STRATEGIES = ("strict-pack", "pack", "spread", "strict-spread")
"""Ray's placement strategies."""
_OPTION = re.compile(r"(?<!\S)--([a-z][a-z-]*)")


def option(
    about: str,
    value: str = "",
    *,
    panel: str = "",
    names: Sequence[str] = (),
    variable: str = "",
    typed: object = None,
    read: Callable[[Any], Any] | None = None,
) -> msgspec.Meta:
    """Return the description of a field that is an option of commands.

    ``about``: its help. ``value``: the placeholder of its value. ``panel``: where ``--help`` lists it; "" for the
    first. ``names``: its names, if they are not derived from the field's. ``variable``: an environment variable that
    gives it too. ``typed`` and ``read``: the type that a
    command line has, and the conversion to the field's type, if they differ.
    """
    extra = {"value": value, "panel": panel, "names": names, "variable": variable, "typed": typed, "read": read}
    return msgspec.Meta(description=about, extra=extra)


@contextmanager
def named_as_parameters() -> Iterator[None]:
    """Have errors name parameters of the library where they name options of a command: ``step_tokens`` for
    ``--step-tokens``."""
    try:
        yield
    except HalError as error:
        for part in ("what", "argument", "cure"):
            text = _OPTION.sub(lambda found: found[1].replace("-", "_"), getattr(error, part))
            setattr(error, part, text)
        raise


def typed_name(name: str) -> str:
    """Return a field's option as the user types it."""
    return f"--{name.replace('_', '-')}"


def split_of(text: str | None) -> tuple[int, int] | None:
    """Parse ``"P,D"`` into numbers of prefill and decode workers; None for None. Raises :class:`InvalidValue`."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        cure = "give the number of prefill and of decode workers, at least 1 each, as 1,1"
        raise InvalidValue(f"{text!r}", cure=cure, argument="--split")
    return int(parts[0]), int(parts[1])


_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def requirements(given: Sequence[str] | None) -> dict[str, str | bool]:
    """Parse ``NAME=VALUE`` items into required capabilities. Yes and no are for capabilities that are true or false."""
    wanted: dict[str, str | bool] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not sign or not name:
            cure = "write --require async_set_value=async"
            raise InvalidValue(f"{text!r} is no NAME=VALUE", cure=cure, argument="--require")
        wanted[name] = _WORDS.get(value.lower(), value)
    return wanted


def runner_of(given: Sequence[str] | None) -> str:
    """Return the named runner, or ``auto``. Raises :class:`InvalidValue` for more than one."""
    if given and len(given) > 1:
        raise InvalidValue(" and ".join(given), cure="name one runner", argument="--runner")
    return given[0] if given else AUTO


def checkpoint_of(given: str | None) -> str | None:
    """Return a checkpoint's folder: the given one, or that of ``ORG/NAME`` in the Hugging Face cache."""
    from hal_engine.model.hub import find_checkpoint

    return None if given is None else str(find_checkpoint(given))


def file_of(given: str | None) -> str | None:
    """Return a file's path for processes that have another working folder."""
    return None if given is None else os.path.abspath(given)


class Ranks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Number of ranks, what starts them and how they work together. Raises :class:`InvalidValue`, which names the
    field, for combinations that are not possible."""

    tp: Annotated[int, option("Split the model over so many ranks (tensor parallelism).", "N", panel="ranks")] = 1
    dp: Annotated[
        int, option("Serve with so many groups of ranks, each with slots and blocks.", "N", panel="ranks")
    ] = 1
    sampling: Annotated[
        str, option("Ranks that sample: first (of each group) or every-rank.", "NAME", panel="ranks")
    ] = "first"
    restart: Annotated[int, option("Restart lost ranks up to N times.", "N", panel="ranks")] = 0
    share_devices: Annotated[
        bool, option("Let ranks of a host open one device together, if it has too few.", panel="ranks")
    ] = False
    split: Annotated[
        tuple[int, int] | None,
        option(
            "Let P workers prefill prompts and D others decode, of --tp ranks each.",
            "P,D",
            panel="split",
            typed=str | None,
            read=split_of,
        ),
    ] = None
    """Numbers of prefill and decode workers; None: every worker does both."""
    transfer: Annotated[
        str | None,
        option("With --split: what moves keys and values in place of hal's own.", "MODULE:NAME", panel="split"),
    ] = None
    launcher: Annotated[
        str,
        option("What starts the ranks: local, on this host, or ray, on the nodes of a cluster.", "NAME", panel="ranks"),
    ] = "local"
    """``paddle``, the name of release 1.1 for ``local``, goes with the next release."""
    ray_address: Annotated[
        str | None,
        option("With --launcher ray: the cluster; RAY_ADDRESS, or one of its own here.", "ADDRESS", panel="ranks"),
    ] = None
    ray_placement: Annotated[
        str,
        option(
            "With --launcher ray, for the ranks of each tensor-parallel group: strict-pack (one node), pack, spread or "
            "strict-spread (a node each).",
            "NAME",
            panel="ranks",
        ),
    ] = "strict-pack"

    def __post_init__(self) -> None:
        with named_as_parameters():
            self.check_ranks()

    def check_ranks(self) -> None:
        """Raise :class:`InvalidValue`, naming options, for what cannot be."""
        for name, least in (("tp", 1), ("dp", 1), ("restart", 0)):
            if (given := getattr(self, name)) < least:
                cure = f"give a whole number of at least {least}"
                raise InvalidValue(f"{given}", cure=cure, argument=typed_name(name))
        if self.split is not None and min(self.split) < 1:
            cure = "give the number of workers of each role, at least 1"
            raise InvalidValue(f"{self.split}", cure=cure, argument="--split")
        if self.split is not None and self.dp > 1:
            cure = "leave it out: a split has the number of workers of each role"
            raise InvalidValue(f"{self.dp} groups of ranks beside a split", cure=cure, argument="--dp")
        known_values = ("launcher", LAUNCHERS), ("ray_placement", STRATEGIES), ("sampling", SAMPLERS)
        for name, known in known_values:
            if (given := getattr(self, name)) not in known and (name, given) != ("launcher", "paddle"):
                raise InvalidValue(f"{given!r}", cure=f"give {' or '.join(known)}", argument=typed_name(name))
        if self.transfer is not None:
            check_maker(self.transfer, "--transfer", "my_transfers:MyTransfer")
        self._check_launcher()

    def _check_launcher(self) -> None:
        """Raise :class:`InvalidValue` for options of another launcher than the one given."""
        if self.launcher == "ray":
            if self.share_devices:
                cure = "leave it out: Ray starts the ranks and assigns their devices"
                raise InvalidValue("it does not go with --launcher ray", cure=cure, argument="--share-devices")
            return
        placed = self.ray_placement != "strict-pack"
        for name, given in (("--ray-address", self.ray_address is not None), ("--ray-placement", placed)):
            if given:
                raise InvalidValue("needs --launcher ray", cure="leave it out, or give that too", argument=name)

    @property
    def size(self) -> int:
        """Ranks of one worker, or of all groups together."""
        return self.tp * self.dp

    @property
    def workers(self) -> int:
        """Number of workers."""
        return 1 if self.split is None else sum(self.split)

    @property
    def several(self) -> bool:
        """Whether ranks run the steps, and not the engine's own process."""
        return self.size > 1 or self.split is not None


class EngineOptions(Ranks, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine is asked for. Raises :class:`InvalidValue`, which names the option, for what cannot be."""

    model: Annotated[
        str | None,
        option(
            "A folder with a checkpoint, or ORG/NAME of the Hugging Face cache; without it, the small model that "
            "ships.",
            "MODEL",
            read=checkpoint_of,
        ),
    ] = None
    device: Annotated[str | None, option("The device: a name that hal devices lists, or NAME:INDEX.", "NAME")] = None
    slots: Annotated[int, option("Most requests that run at once; the others wait.", "N", panel="scheduling")] = 8
    blocks: Annotated[
        int | None, option("KV blocks of 16 tokens; as many as may be needed if not given.", "N", panel="scheduling")
    ] = None
    max_model_len: Annotated[
        int | None, option("Most tokens of a request with its prompt.", "N", panel="scheduling")
    ] = None
    chunk: Annotated[
        int | None,
        option(
            "Most prompt tokens that a step feeds: longer prompts go in pieces. 256, or what the runner prefers.",
            "N",
            panel="scheduling",
        ),
    ] = None
    step_tokens: Annotated[
        int | None,
        option(
            "Most tokens that a step feeds, next tokens and drafts included; as many as come.", "N", panel="scheduling"
        ),
    ] = None
    overlap: Annotated[
        str,
        option(
            "Prepare the next step while the device runs one: auto (where it can be), on (or an error), off.",
            "NAME",
            panel="scheduling",
        ),
    ] = "auto"
    require: Annotated[
        dict[str, str | bool],
        option(
            "Refuse a device without it, as async_set_value=async, or substituted= for no stand-in; may be given "
            "several times.",
            "NAME=VALUE",
            panel="device and runner",
            typed=list[str] | None,
            read=requirements,
        ),
    ] = {}
    runner: Annotated[
        str,
        option(
            "What runs the steps: auto (the installed runner of the device where it can run, else paddle), paddle (the "
            "Paddle model), an installed one, as torch, or yours, MODULE:NAME, as my_runners:MyRunner.",
            "NAME",
            panel="device and runner",
            typed=list[str] | None,
            read=runner_of,
        ),
    ] = AUTO
    dtype: Annotated[
        str,
        option(
            "What a runner computes in: auto (the checkpoint's own type) or float32.", "NAME", panel="device and runner"
        ),
    ] = "auto"
    model_place: Annotated[
        str, option("The Paddle place that the Paddle model runs on.", "PLACE", panel="device and runner")
    ] = MODEL_PLACE
    speculate: Annotated[
        str,
        option(
            "What drafts tokens, several of which a step verifies: naive, ngram, suffix, mtp, hybrid, an installed "
            "proposer, or two or more as first+second. It changes no token.",
            "NAME",
            panel="speculation",
        ),
    ] = NONE
    drafts: Annotated[
        int | None,
        option(
            f"Most drafts that a step verifies of a prompt, 1 to {MOST_DRAFTS}: of the proposer (then "
            f"{USUAL_DRAFTS} by default), or of a --runner that drafts on the device (by default none).",
            "N",
            panel="speculation",
        ),
    ] = None
    trace: Annotated[
        str | None,
        option(
            "Write what steps, hooks and tickets took to a file, for ui.perfetto.dev.",
            "FILE",
            panel="output",
            read=file_of,
        ),
    ] = None
    acceptance: Annotated[
        str,
        option(
            "How drafts are accepted: exact, which changes no token, or rejection, which keeps the distribution of "
            "sampled tokens alone.",
            "NAME",
            panel="speculation",
        ),
    ] = "exact"

    def __post_init__(self) -> None:
        self.check_ranks()
        self._check_idle()
        for name in ("slots", "blocks", "max_model_len", "chunk", "step_tokens"):
            value, least = getattr(self, name), 2 if name == "max_model_len" else 1  # a prompt and an answer
            if value is not None and value < least:
                cure = f"give a whole number of at least {least}"
                raise InvalidValue(f"{value}", cure=cure, argument=typed_name(name))
        check_drafts_count(self.drafts)
        check_acceptance(self.acceptance, self.speculate)
        check_overlap(self.overlap)
        check_runner_name(self.runner)
        check_dtype(self.dtype)
        if self.named_runner:
            self._check_runner()
        elif self.asks_runner and (self.runner == DEFAULT or self.why_default):
            raise no_drafts(self.why_default)

    def _check_idle(self) -> None:
        """Raise :class:`InvalidValue` for an option that would have no effect."""
        divided, several = self.split is not None, self.several
        none, more = "needs more than one rank", "--tp, --dp or --split"
        for name, given, enough, why, needs in (
            ("--sampling", self.sampling != "first", self.tp > 1, "each group has a single rank", "--tp"),
            ("--transfer", self.transfer is not None, divided, "no request moves to another worker", "--split"),
            ("--restart", self.restart > 0, several, none, more),
            ("--share-devices", self.share_devices, several, none, more),
            ("--launcher", self.launcher == "ray", several, none, more),
        ):
            if given and not enough:
                cure = f"leave it out, or give {needs} as well"
                raise InvalidValue(why if several else none, cure=cure, argument=name)

    def _check_runner(self) -> None:
        """Raise :class:`InvalidValue` for options of the Paddle model if another runner is named."""
        if self.speculate != NONE:
            raise refused_with_runner(self.speculate)
        if self.sampling != "first":
            raise InvalidValue("it concerns the Paddle model", cure="leave it out, or --runner", argument="--sampling")

    def check_launcher(self) -> None:
        """Raise :class:`Unavailable` if the launcher is not installed."""
        if self.launcher == "ray" and find_spec("ray") is None:
            cure = "pip install 'paddle-hal[ray]>=1.1,<2'"
            raise Unavailable("the Python package 'ray' is not installed", cure=cure, argument="--launcher")

    @property
    def named_runner(self) -> str:
        """Name of the runner that the user chose; "" for the Paddle model and for ``auto``."""
        return "" if self.runner in (AUTO, DEFAULT) else self.runner

    @property
    def asks_runner(self) -> bool:
        """Whether a runner drafts for itself."""
        return self.drafts is not None and self.speculate == NONE

    @property
    def most_drafts(self) -> int:
        """Most drafts that a step verifies for a prompt; 0: no drafts."""
        return most_drafts(self.speculate, self.drafts)

    @property
    def drafter(self) -> str:
        """The proposer, or the named runner that drafts for itself; "" if nothing drafts."""
        return self.speculate if self.speculate != NONE else self.runner if self.asks_runner else ""

    @property
    def rejection(self) -> bool:
        """Whether drafts are accepted by rejection."""
        return self.acceptance == REJECTION

    @property
    def everywhere(self) -> bool:
        """Whether every rank of a group samples."""
        return self.sampling != "first"

    @property
    def why_default(self) -> str:
        """Why these options need the Paddle model, whatever else is installed; "" if they do not."""
        if self.speculate != NONE:
            return f"{self.speculate} drafts beside it"
        if self.model_place != MODEL_PLACE:
            return f"--model-place {self.model_place} is its place"
        return "there are several ranks, for which a runner is named" if self.several else ""


def engine_options(given: Mapping[str, object]) -> EngineOptions:
    """Return the options of these names and values. Raises :class:`InvalidValue` for a value of another type, naming
    the option. ``require`` may be None."""
    try:
        return msgspec.convert({**given, "require": given.get("require") or {}}, EngineOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidValue):  # of a check of the options themselves
            raise error.__cause__ from None
        what, _, where = str(error).partition(" - at `$.")
        name = where.split("`")[0].split("[")[0].split(".")[0]
        raise InvalidValue(what[:1].lower() + what[1:], cure="give such a value", argument=typed_name(name)) from None


class EngineSetup(EngineOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that an engine is made of: its options, and what they come to for the checkpoint.

    ``model``: the checkpoint's folder. ``blocks``: KV blocks of ``sizes.block_size`` tokens. ``sizes``: of the state;
    with the number of drafts that a step verifies. ``params``: parameters that a runner must support; None: any.
    ``sink``: an address for records beside the engine's own, or ""; ``sink_key``: the secret key for it over tcp, or
    "". ``timed``: measure the device's time of steps. ``check``: ranks compare their states after each step.
    """

    model: str
    blocks: int
    sizes: StateConfig
    params: SamplingParams | None = None
    sink: str = ""
    sink_key: str = ""
    timed: bool = False
    check: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, for a message that adds some."""
        return {name: getattr(self, name) for name in EngineSetup.__struct_fields__}

    @property
    def all_slots(self) -> int:
        """Requests that can run at once, in all groups of ranks."""
        return self.sizes.num_slots * (self.dp if self.split is None else self.split[1])
