"""The options of ``hal run``, checked: each error names the option and the cure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import InvalidValue, SamplingParams

from hal.makers import check_maker
from hal.proposers import NONE
from hal.sharing import SHARED
from hal.stepping import AUTO, PADDLE, check_dtype, check_overlap, check_runner_name

if TYPE_CHECKING:
    from hal.model.config import LlamaConfig
    from hal.transport.curve import CurveKeys

STRATEGIES = ("strict-pack", "pack", "spread", "strict-spread")
"""What ``--ray-placement`` takes: Ray's placement strategies."""
REJECTION = "rejection"
MOST_DRAFTS, USUAL_DRAFTS = 5, 4
"""Most drafts of a step, and how many a proposer may make unless told."""
_OF_THE_CHECKPOINT = {"mtp", "hybrid"}
"""Proposers that draft with the checkpoint's own prediction layer."""
PADDLE_MODEL = "the Paddle model"
"""What the runner is called where none is named."""
MODEL_PLACE = "cpu"
"""Where the Paddle model runs unless told."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How many ranks there are, and how they work together. Raises :class:`InvalidValue` for what cannot be."""

    tp: int = 1
    dp: int = 1
    sampling: str = "first"
    dp_sync: bool = False
    restart: int = 0
    share_devices: bool = False
    split: tuple[int, int] | None = None
    """How many prefill and how many decode workers there are; None: every worker does both."""
    transfer: str | None = None
    """MODULE:NAME of what moves keys and values between workers; None: hal's own."""
    launcher: str = "paddle"
    """What starts the ranks: paddle, on this host, or ray."""
    ray_address: str | None = None
    """The Ray cluster; None: RAY_ADDRESS, else one of this command's own on this host."""
    ray_placement: str = "strict-pack"
    """How Ray places the ranks of a tensor-parallel group."""

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("dp", 1), ("restart", 0)):
            if getattr(self, name) < least:
                cure = f"give a whole number of at least {least}"
                raise InvalidValue(f"{getattr(self, name)}", cure=cure, argument=f"--{name}")
        if self.sampling not in ("first", "every-rank"):
            raise InvalidValue(f"{self.sampling!r}", cure="give first or every-rank", argument="--sampling")
        if self.split is not None and self.dp > 1:
            cure = "leave it out: --split P,D has as many workers of each role as it says"
            raise InvalidValue(f"{self.dp} groups of ranks that do both", cure=cure, argument="--dp")
        self._check_launcher()
        if self.transfer is not None:
            check_maker(self.transfer, "--transfer", "my_transfers:MyTransfer")
        idle = "there is one rank, of which this asks nothing"
        together = "--dp without --split" if self.split else "--dp"
        divided = self.split is not None
        several = self.size > 1 or divided
        for name, given, enough, why, needs in (
            ("--sampling", self.sampling != "first", self.tp > 1, "each group has one rank, which samples", "--tp"),
            ("--dp-sync", self.dp_sync, self.dp > 1, "there is one group, which waits for no other", together),
            ("--transfer", self.transfer is not None, divided, "no request moves to another worker", "--split"),
            ("--restart", self.restart > 0, several, idle, "--tp, --dp or --split"),
            (SHARED, self.share_devices, several, idle, "--tp, --dp or --split"),
            ("--launcher", self.launcher != "paddle", several, idle, "--tp, --dp or --split"),
        ):
            if given and not enough:
                what = why if several else idle
                raise InvalidValue(what, cure=f"leave it out, or give {needs} as well", argument=name)

    def _check_launcher(self) -> None:
        for name, given, known in (
            ("--launcher", self.launcher, ("paddle", "ray")),
            ("--ray-placement", self.ray_placement, tuple(STRATEGIES)),
        ):
            if given not in known:
                raise InvalidValue(f"{given!r}", cure=f"give {' or '.join(known)}", argument=name)
        if self.launcher == "ray":
            if self.share_devices:
                cure = "leave it out: Ray starts the ranks and assigns their devices"
                raise InvalidValue("it does not go with --launcher ray", cure=cure, argument=SHARED)
            return
        for name, asked in (
            ("--ray-address", self.ray_address is not None),
            ("--ray-placement", self.ray_placement != "strict-pack"),
        ):
            if asked:
                raise InvalidValue("needs --launcher ray", cure="leave it out, or give that too", argument=name)

    @property
    def size(self) -> int:
        """How many ranks there are of one worker, or of all groups."""
        return self.tp * self.dp


def check_drafts_count(drafts: int | None) -> None:
    """Raise :class:`InvalidValue` for a count of drafts that a state has no room for."""
    if drafts is not None and not 1 <= drafts <= MOST_DRAFTS:
        raise InvalidValue(f"{drafts}", cure=f"give a whole number from 1 to {MOST_DRAFTS}", argument="--drafts")


def no_drafts(why: str) -> InvalidValue:
    """Return the refusal of ``--drafts`` where the Paddle model runs without a proposer; ``why`` it runs, where that
    was not asked for."""
    what = f"the Paddle model runs{f', as {why}' if why else ''}, and nothing drafts for it"
    cure = "name a proposer with --speculate, or a --runner that drafts on the device"
    return InvalidValue(what, cure=cure, argument="--drafts")


def check_layer(speculate: str, config: LlamaConfig) -> None:
    """Raise :class:`InvalidValue` where the checkpoint has no prediction layer to draft with."""
    if not config.num_nextn_predict_layers and _OF_THE_CHECKPOINT & set(speculate.split("+")):
        raise InvalidValue(
            f"{speculate}: the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
            cure="choose another proposer, as ngram, or a checkpoint that has one",
            argument="--speculate",
        )


def check_acceptance(acceptance: str, speculate: str) -> None:
    """Raise :class:`InvalidValue` for a way to accept drafts that there is not."""
    if acceptance not in ("exact", REJECTION):
        raise InvalidValue(f"{acceptance!r}", cure=f"give exact or {REJECTION}", argument="--acceptance")
    if acceptance == REJECTION and speculate == NONE:
        cure = "leave it out, or name a proposer with --speculate"
        raise InvalidValue("there are no drafts to accept", cure=cure, argument="--acceptance")


def split_of(text: str | None) -> tuple[int, int] | None:
    """``"P,D"`` as numbers of prefill and decode workers; None for None. Raises :class:`InvalidValue`."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        cure = "give the number of prefill and of decode workers, at least 1 each, as 1,1"
        raise InvalidValue(f"{text!r}", cure=cure, argument="--split")
    return int(parts[0]), int(parts[1])


@dataclass(frozen=True, slots=True)
class Options:
    """What concerns all prompts alike. Raises :class:`InvalidValue` for a count that is not positive."""

    device: str | None
    require: Mapping[str, str | bool]
    model: Path
    model_place: str
    slots: int
    blocks: int | None
    chunk: int
    stop: Sequence[str]
    speculate: str
    drafts: int | None
    as_json: bool
    sink: str | None = None
    ranks: RankOptions = RankOptions()
    acceptance: str = "exact"
    runner: str = AUTO
    overlap: str = "auto"
    step_tokens: int | None = None
    dtype: str = "auto"
    key: Path | None = None
    """The file with the key that this command and the reader of ``sink`` have in common, for tcp."""

    def __post_init__(self) -> None:
        for name in ("slots", "blocks", "chunk", "step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                argument = f"--{name.replace('_', '-')}"
                raise InvalidValue(f"{value}", cure="give a whole number of at least 1", argument=argument)
        check_drafts_count(self.drafts)
        check_acceptance(self.acceptance, self.speculate)
        if self.key is not None and not self.sends_by_tcp:
            cure = "leave it out, or give --sink tcp://host:port"
            raise InvalidValue("nothing goes over the network", cure=cure, argument="--key")
        check_overlap(self.overlap)
        check_runner_name(self.runner)
        check_dtype(self.dtype)
        if self.named_runner:
            self._check_runner()
        elif self.asks_runner and (self.runner == PADDLE or self.paddle_alone):
            raise no_drafts(self.paddle_alone)
        for text in self.stop:
            if not text:
                raise InvalidValue("an empty text", cure="leave it out", argument="--stop")
            check_argument(text, "--stop")
            if "\ufffd" in text:
                raise InvalidValue(
                    "U+FFFD stands for bytes that are no text", cure="give the text without it", argument="--stop"
                )

    @property
    def sends_by_tcp(self) -> bool:
        """Whether the records go elsewhere over the network."""
        return (self.sink or "").startswith("tcp:")

    def sink_keys(self) -> CurveKeys | None:
        """The keys for ``--sink``. Raises :class:`InvalidValue` where it goes to another host and there is none."""
        if not self.sends_by_tcp:
            return None
        from hal.transport.key_file import record_keys  # with ZeroMQ behind it

        return record_keys(str(self.sink), self.key)

    @property
    def named_runner(self) -> str:
        """The runner that was named; "" for the Paddle model and for ``auto``."""
        return "" if self.runner in (AUTO, PADDLE) else self.runner

    @property
    def asks_runner(self) -> bool:
        """Whether a runner is to draft for itself."""
        return self.drafts is not None and self.speculate == NONE

    @property
    def most_drafts(self) -> int:
        """Most drafts that a step verifies of a prompt; 0: steps are plain."""
        return USUAL_DRAFTS if self.drafts is None and self.speculate != NONE else self.drafts or 0

    @property
    def paddle_alone(self) -> str:
        """Why the Paddle model runs whatever else is installed, as far as the options say; "": they do not."""
        if self.speculate != NONE:
            return f"{self.speculate} drafts beside it"
        if self.model_place != MODEL_PLACE:
            return f"--model-place {self.model_place} is its place"
        several = self.ranks.size > 1 or self.ranks.split
        return "there are several ranks, for which a runner is named" if several else ""

    def _check_runner(self) -> None:
        """Refuse options that concern the Paddle model alone."""
        if self.speculate != NONE:
            cure = "leave it out: with --drafts K a runner drafts for itself"
            raise InvalidValue(f"{self.speculate} drafts beside the Paddle model", cure=cure, argument="--speculate")
        for option, asked in (("--dp-sync", self.ranks.dp_sync), ("--sampling", self.ranks.sampling != "first")):
            if asked:
                raise InvalidValue("it concerns the Paddle model", cure="leave it out, or --runner", argument=option)


def check_argument(text: str, option: str) -> None:
    """Refuse an argument that holds bytes which the locale could not decode; Python makes surrogates of those."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return
    locale, file = sys.getfilesystemencoding(), ", or give it in a UTF-8 file with --prompts" * (option == "--prompt")
    if _is_utf8(text):
        why, cure = f"the locale's encoding, {locale}, cannot carry it", f"set a UTF-8 locale, as LC_ALL=C.UTF-8{file}"
    else:
        why, cure = f"it has bytes that are no text in {locale}, the locale's encoding", f"send it as {locale}{file}"
    raise InvalidValue(why, cure=cure, argument=option)


def _is_utf8(text: str) -> bool:
    """Whether the bytes of an argument are UTF-8, whatever the locale made of them."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return True


_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def requirements(given: Sequence[str]) -> dict[str, str | bool]:
    """What a device must offer, from ``NAME=VALUE`` each; yes and no are for abilities that it has or has not."""
    wanted: dict[str, str | bool] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise InvalidValue(
                f"{text!r} is no NAME=VALUE", cure="write --require async_set_value=async", argument="--require"
            )
        wanted[name] = _WORDS.get(value.lower(), value)
    return wanted


def runner_of(given: Sequence[str]) -> str:
    """The runner that was named; ``auto`` where none was. Raises :class:`InvalidValue` for more than one."""
    if len(given) > 1:
        raise InvalidValue(" and ".join(given), cure="name one runner", argument="--runner")
    return given[0] if given else AUTO


def sampling_params(**values: Any) -> SamplingParams:  # noqa: ANN401 (the types are those of SamplingParams)
    """The parameters all prompts share; an error names the option."""
    try:
        return SamplingParams(**values)
    except InvalidValue as error:
        error.argument = f"--{error.argument.replace('_', '-')}"
        error.what = error.what.split(" = ", 1)[-1]
        raise


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """All prompts in order, those of the file last, one a line. Refused when there is none that is not empty."""
    for text in given:
        check_argument(text, "--prompt")
    texts = list(given)
    if file is not None:
        texts += _lines(file)
    if not texts:
        raise InvalidValue("there is none", cure="give --prompt TEXT or --prompts FILE", argument="prompt")
    if not any(texts):
        only = "the only prompt is empty" if len(texts) == 1 else f"all {len(texts)} prompts are empty"
        raise InvalidValue(only, cure="give a text of at least one character", argument="--prompt")
    return texts


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidValue(
            f"no file {str(file)!r}", cure="give a file with one prompt a line", argument="--prompts"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"{str(file)!r} is no UTF-8 text: {error}", cure="convert it", argument="--prompts"
        ) from None
    except OSError as error:
        raise InvalidValue(
            f"cannot read {str(file)!r}: {error.strerror}", cure="give a readable file", argument="--prompts"
        ) from None
    if not text:
        raise InvalidValue(f"{str(file)!r} is empty", cure="write one prompt a line", argument="--prompts")
    return text.removesuffix("\n").split("\n")
