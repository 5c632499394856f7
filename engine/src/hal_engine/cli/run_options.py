"""Options of ``hal run``: one field each, with its help and its checks. typer's parameters are built from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import InvalidValue, SamplingParams

from hal.local_rank import SHARED
from hal_engine.distributed.ranks import Ranks
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.hub import find_checkpoint
from hal_engine.model.stops import checked_stops
from hal_engine.object_loader import check_maker
from hal_engine.proposers import NONE
from hal_engine.proposers.asked import (
    MOST_DRAFTS,
    USUAL_DRAFTS,
    check_acceptance,
    check_drafts_count,
    drafts_beside,
    most_drafts,
    no_drafts,
)
from hal_engine.stepping import AUTO, PADDLE, check_dtype, check_overlap, check_runner_name

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys

PADDLE_MODEL = "the Paddle model"
"""Name of the default runner in messages."""
MODEL_PLACE = "cpu"
"""Default place of the Paddle model."""


def option(
    default: Any,  # noqa: ANN401 (of the field's type)
    about: str,
    value: str = "",
    *,
    group: str = "",
    names: Sequence[str] = (),
    typed: Any = None,  # noqa: ANN401 (a type)
    read: Callable[[Any], Any] | None = None,
) -> Any:  # noqa: ANN401 (what a dataclass takes for a field)
    """Return a dataclass field that is an option of the command.

    ``about``: its help. ``value``: the placeholder of its value. ``group``: its panel in ``--help-all``; "" also lists
    it in ``--help``. ``names``: its names, if they are not derived from the field's. ``typed`` and ``read``: the type
    that typer parses and the conversion to the field's type, if they differ.
    """
    told = {"about": about, "value": value, "group": group, "names": names, "typed": typed, "read": read}
    metadata = {"option": told}
    return (
        field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)
    )


def flag(about: str, *names: str, group: str = "") -> Any:  # noqa: ANN401 (as above)
    """Return a field that is True if its option is given."""
    return option(False, about, group=group, names=names)


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
            raise InvalidValue(
                f"{text!r} is no NAME=VALUE", cure="write --require async_set_value=async", argument="--require"
            )
        wanted[name] = _WORDS.get(value.lower(), value)
    return wanted


def runner_of(given: Sequence[str] | None) -> str:
    """Return the named runner, or ``auto``. Raises :class:`InvalidValue` for more than one."""
    if given and len(given) > 1:
        raise InvalidValue(" and ".join(given), cure="name one runner", argument="--runner")
    return given[0] if given else AUTO


def find_model(given: str | None) -> Path:
    """Return a checkpoint's folder: the given one, or that of ``ORG/NAME`` in the Hugging Face cache."""
    return DEFAULT_CHECKPOINT if given is None else find_checkpoint(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. A line of ``--prompts FILE.jsonl`` may set each of these for its prompt."""

    max_tokens: int = option(64, "Most tokens to generate for each prompt.", "N")
    temperature: float = option(0.7, "Higher: more varied. 0: always the best token.", "X")
    top_p: float = option(0.9, "Draw from the best tokens that make up X of the probability.", "X")
    seed: int = option(0, "Draws depend on it, the prompt's number and the position.", "N")
    top_k: int = option(0, "Draw from the N best tokens; 0: from all.", "N", group="sampling")
    min_p: float = option(
        0.0, "Of these, draw from those at least X times as likely as the best.", "X", group="sampling"
    )
    repetition_penalty: float = option(
        1.0, "Above 1: less of what the text has, prompt included.", "X", group="sampling"
    )
    frequency_penalty: float = option(0.0, "Above 0: less of what was generated, for each time.", "X", group="sampling")
    presence_penalty: float = option(0.0, "Above 0: less of what was generated at all.", "X", group="sampling")
    min_tokens: int = option(0, "No end token and no stop text before N tokens.", "N", group="sampling")
    ignore_eos: bool = flag("End tokens are tokens like any other: no answer ends with one.", group="sampling")
    logprobs: int | None = option(
        None, "With --json: log-probabilities, and those of the N best tokens.", "N", group="output"
    )
    stop: Sequence[str] = option(
        (),
        "End where the answer contains this text; may be given up to 16 times.",
        "TEXT",
        group="sampling",
        typed=list[str] | None,
        read=lambda given: tuple(given or ()),
    )

    def __post_init__(self) -> None:
        for text in checked_stops(self.stop, "--stop"):
            check_argument(text, "--stop")

    def params(self) -> SamplingParams:
        """Return the parameters. Raises :class:`InvalidValue`, which names the option.

        At temperature 0 ``top_p`` is set to 1, so that a runner without truncation accepts the parameters.
        """
        told = {name: value for name, value in asdict(self).items() if name not in ("stop", "ignore_eos")}
        try:
            params = SamplingParams(**told)
            return replace(params, top_p=1.0) if params.temperature == 0 else params
        except InvalidValue as error:
            error.argument = f"--{error.argument.replace('_', '-')}"
            raise

    def check_given(self, given: Sequence[str]) -> None:
        """Raise :class:`InvalidValue` if an option of random sampling is given at temperature 0.

        The seed is allowed, because a custom ``--runner`` may use it.
        """
        for name in ("top_p", "top_k", "min_p"):
            if name in given and self.temperature == 0:
                cure = "leave it out, or give a --temperature above 0"
                raise InvalidValue("nothing is drawn at --temperature 0", cure=cure, argument=_typed(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Number of ranks, and how they work together. Raises :class:`InvalidValue` for combinations that are not
    possible."""

    tp: int = option(1, "Split the model over so many ranks (tensor parallelism).", "N", group="ranks")
    dp: int = option(1, "Serve with so many groups of ranks, each with slots and blocks.", "N", group="ranks")
    sampling: str = option("first", "Ranks that sample: first (of each group) or every-rank.", "NAME", group="ranks")
    dp_sync: bool = flag("All groups take each step together, as expert parallelism needs it.", group="ranks")
    restart: int = option(0, "Restart lost ranks up to N times.", "N", group="ranks")
    share_devices: bool = flag("Let ranks of a host open one device together, if it has too few.", group="ranks")
    split: tuple[int, int] | None = option(
        None,
        "Let P workers prefill prompts and D others decode, of --tp ranks each.",
        "P,D",
        group="split",
        typed=str | None,
        read=split_of,
    )
    """Numbers of prefill and decode workers; None: every worker does both."""
    transfer: str | None = option(
        None, "With --split: what moves keys and values in place of hal's own.", "MODULE:NAME", group="split"
    )
    launcher: str = option(
        "paddle",
        "What starts the ranks: paddle, on this host, or ray, on the nodes of a cluster.",
        "NAME",
        group="ranks",
    )
    ray_address: str | None = option(
        None, "With --launcher ray: the cluster; RAY_ADDRESS, or one of its own here.", "ADDRESS", group="ranks"
    )
    ray_placement: str = option(
        "strict-pack",
        "With --launcher ray, for the ranks of each tensor-parallel group: strict-pack (one node), pack, spread or "
        "strict-spread (a node each).",
        "NAME",
        group="ranks",
    )

    def __post_init__(self) -> None:
        self._check_launcher()
        ranks = self.ranks()
        if self.sampling not in ("first", "every-rank"):
            raise InvalidValue(f"{self.sampling!r}", cure="give first or every-rank", argument="--sampling")
        if self.transfer is not None:
            check_maker(self.transfer, "--transfer", "my_transfers:MyTransfer")
        idle = "needs more than one rank"
        together = "--dp without --split" if self.split else "--dp"
        divided = self.split is not None
        several = ranks.size > 1 or divided
        for name, given, enough, why, needs in (
            ("--sampling", self.sampling != "first", self.tp > 1, "each group has a single rank", "--tp"),
            ("--dp-sync", self.dp_sync, self.dp > 1, "needs more than one group of ranks", together),
            ("--transfer", self.transfer is not None, divided, "no request moves to another worker", "--split"),
            ("--restart", self.restart > 0, several, idle, "--tp, --dp or --split"),
            (SHARED, self.share_devices, several, idle, "--tp, --dp or --split"),
            ("--launcher", self.launcher != "paddle", several, idle, "--tp, --dp or --split"),
        ):
            if given and not enough:
                what = why if several else idle
                raise InvalidValue(what, cure=f"leave it out, or give {needs} as well", argument=name)

    def _check_launcher(self) -> None:
        """Raise :class:`InvalidValue` for options of another launcher than the one given."""
        placed = self.ray_placement != "strict-pack"
        for name, given in (("--ray-address", self.ray_address is not None), ("--ray-placement", placed)):
            if given and self.launcher != "ray":
                raise InvalidValue("needs --launcher ray", cure="leave it out, or give that too", argument=name)
        if self.share_devices and self.launcher == "ray":
            cure = "leave it out: Ray starts the ranks and assigns their devices"
            raise InvalidValue("it does not go with --launcher ray", cure=cure, argument=SHARED)

    def ranks(self) -> Ranks:
        """Return the ranks. Raises :class:`InvalidValue`, which names the option."""
        try:
            return Ranks(**{name: getattr(self, name) for name in Ranks.__struct_fields__})
        except InvalidValue as error:
            error.argument = _typed(error.argument)
            raise

    @property
    def size(self) -> int:
        """Ranks of one worker, or of all groups together."""
        return self.ranks().size


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that apply to all prompts. Raises :class:`InvalidValue` for combinations that are not possible."""

    model: Path = option(  # noqa: RUF009 (a field)
        DEFAULT_CHECKPOINT,
        "A folder with a checkpoint, or ORG/NAME of the Hugging Face cache; without it, the small model that ships.",
        "MODEL",
        typed=str | None,
        read=find_model,
    )
    device: str | None = option(None, "The device: a name that hal devices lists, or NAME:INDEX.", "NAME")
    as_json: bool = flag("Print one JSON object a prompt, in their order.", "--json")
    verbose: bool = flag("Show choices, fallbacks and tracebacks.", "--verbose", "-v")
    quiet: bool = flag("Print the text alone, and errors.", "--quiet", "-q")
    slots: int = option(8, "Most prompts that run at once; the others wait.", "N", group="scheduling")
    blocks: int | None = option(
        None, "KV blocks of 16 tokens; as many as may be needed if not given.", "N", group="scheduling"
    )
    chunk: int | None = option(
        None,
        "Most prompt tokens that a step feeds: longer prompts go in pieces. 256, or what the runner prefers.",
        "N",
        group="scheduling",
    )
    step_tokens: int | None = option(
        None,
        "Most tokens that a step feeds, next tokens and drafts included; as many as come.",
        "N",
        group="scheduling",
    )
    overlap: str = option(
        "auto",
        "Prepare the next step while the device runs one: auto (where it can be), on (or an error), off.",
        "NAME",
        group="scheduling",
    )
    require: Mapping[str, str | bool] = option(
        dict,
        "Refuse a device without it, as async_set_value=async, or substituted= for no stand-in; may be given several "
        "times.",
        "NAME=VALUE",
        group="device and runner",
        typed=list[str] | None,
        read=requirements,
    )
    runner: str = option(
        AUTO,
        "What runs the steps: auto (the installed runner of the device where it can run, else paddle), paddle (the "
        "Paddle model), an installed one, as torch, or yours, MODULE:NAME, as my_runners:MyRunner.",
        "NAME",
        group="device and runner",
        typed=list[str] | None,
        read=runner_of,
    )
    dtype: str = option(
        "auto",
        "What a runner computes in: auto (the checkpoint's own type) or float32.",
        "NAME",
        group="device and runner",
    )
    model_place: str = option(
        MODEL_PLACE, "The Paddle place that the Paddle model runs on.", "PLACE", group="device and runner"
    )
    speculate: str = option(
        NONE,
        "What drafts tokens, several of which a step verifies: naive, ngram, suffix, mtp, hybrid, an installed "
        "proposer, or two or more as first+second. It changes no token.",
        "NAME",
        group="speculation",
    )
    drafts: int | None = option(
        None,
        f"Most drafts that a step verifies of a prompt, 1 to {MOST_DRAFTS}: of the proposer (then "
        f"{USUAL_DRAFTS} by default), or of a --runner that drafts on the device (by default none).",
        "N",
        group="speculation",
    )
    acceptance: str = option(
        "exact",
        "How drafts are accepted: exact, which changes no token, or rejection, which keeps the distribution of sampled "
        "tokens alone.",
        "NAME",
        group="speculation",
    )
    sink: str | None = option(
        None,
        "Send the records there as well: ipc:// or tcp:// for hal tail or an engine, sysv:// for FastDeploy's readers. "
        "With --dp or --split each worker that sends has a sysv queue of its own, ids counting up.",
        "URL",
        group="output",
    )
    key: Path | None = option(  # noqa: RUF009 (a field)
        None, "With --sink over tcp: the key of hal tail or another reader.", "FILE", group="output"
    )
    """File with the shared key of this command and the reader of ``sink``, for tcp."""
    record: Path | None = option(  # noqa: RUF009 (a field)
        None,
        "Record what changes the device's state, for hal conform NAME --replay FILE.",
        "FILE",
        group="output",
    )
    ranks: RankOptions = RankOptions()

    def __post_init__(self) -> None:
        for name in ("slots", "blocks", "chunk", "step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"{value}", cure="give a whole number of at least 1", argument=_typed(name))
        check_drafts_count(self.drafts)
        check_acceptance(self.acceptance, self.speculate)
        if self.key is not None and not self.sends_by_tcp:
            cure = "leave it out, or give --sink tcp://host:port"
            raise InvalidValue("nothing goes over the network", cure=cure, argument="--key")
        if self.record is not None and (self.ranks.size > 1 or self.ranks.split):
            cure = "leave it out, or run one rank"
            raise InvalidValue("a recording has the calls of one rank", cure=cure, argument="--record")
        check_overlap(self.overlap)
        check_runner_name(self.runner)
        check_dtype(self.dtype)
        if self.named_runner:
            self._check_runner()
        elif self.asks_runner and (self.runner == PADDLE or self.paddle_alone):
            raise no_drafts(self.paddle_alone)
        if self.quiet and self.verbose:
            raise InvalidValue("it contradicts --verbose", cure="leave one of them out", argument="--quiet")

    def check_shown(self, prompts: Iterable[Sampling]) -> None:
        """Raise :class:`InvalidValue` if a prompt asks for log-probabilities without ``--json``."""
        if not self.as_json and any(sampling.logprobs is not None for sampling in prompts):
            cure = "give --json as well, or leave it out"
            raise InvalidValue("text does not show them", cure=cure, argument="--logprobs")

    @property
    def sends_by_tcp(self) -> bool:
        """Whether records are sent over the network."""
        return (self.sink or "").startswith("tcp:")

    def sink_keys(self) -> CurveKeys | None:
        """Return the keys for ``--sink``. Raises :class:`InvalidValue` if another host is to be reached without a
        key."""
        if not self.sends_by_tcp:
            return None
        from hal_engine.transport.key_file import record_keys  # imports ZeroMQ

        return record_keys(str(self.sink), self.key)

    @property
    def named_runner(self) -> str:
        """Name of the runner that the user chose; "" for the Paddle model and for ``auto``."""
        return "" if self.runner in (AUTO, PADDLE) else self.runner

    @property
    def asks_runner(self) -> bool:
        """Whether a runner drafts for itself."""
        return self.drafts is not None and self.speculate == NONE

    @property
    def most_drafts(self) -> int:
        """Most drafts that a step verifies for a prompt; 0: no drafts."""
        return most_drafts(self.speculate, self.drafts)

    @property
    def paddle_alone(self) -> str:
        """Why these options need the Paddle model, whatever else is installed; "" if they do not."""
        if self.speculate != NONE:
            return f"{self.speculate} drafts beside it"
        if self.model_place != MODEL_PLACE:
            return f"--model-place {self.model_place} is its place"
        several = self.ranks.size > 1 or self.ranks.split
        return "there are several ranks, for which a runner is named" if several else ""

    def _check_runner(self) -> None:
        """Raise :class:`InvalidValue` for options of the Paddle model if another runner is named."""
        if self.speculate != NONE:
            raise drafts_beside(self.speculate)
        for option, asked in (("--dp-sync", self.ranks.dp_sync), ("--sampling", self.ranks.sampling != "first")):
            if asked:
                raise InvalidValue("it concerns the Paddle model", cure="leave it out, or --runner", argument=option)


def _typed(name: str) -> str:
    """Return a field's option as the user types it."""
    return f"--{name.replace('_', '-')}"


def check_argument(text: str, option: str) -> None:
    """Raise :class:`InvalidValue` if an argument holds bytes that the locale cannot decode; Python turns them into
    surrogates."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return
    locale, file = (
        sys.getfilesystemencoding(),
        ", or give it in a UTF-8 file with --prompts" * (option in ("PROMPT", "--prompt")),
    )
    if _is_utf8(text):
        why, cure = f"the locale's encoding, {locale}, cannot carry it", f"set a UTF-8 locale, as LC_ALL=C.UTF-8{file}"
    else:
        why, cure = f"it has bytes that are no text in {locale}, the locale's encoding", f"send it as {locale}{file}"
    raise InvalidValue(why, cure=cure, argument=option)


def _is_utf8(text: str) -> bool:
    """Return whether the bytes of an argument are UTF-8, whatever the locale."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return True
