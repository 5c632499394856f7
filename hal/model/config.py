"""``config.json`` of a Llama- or Qwen2-style checkpoint, parsed and validated without any framework.

Every field of the file is known here: it is used, or it is known to have no effect on inference, or it must have the
one value that this decoder implements. Anything else is refused with the field named, because a field that is silently
ignored gives a model that runs and writes nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hal_core import InvalidValue

from hal.model.config_fields import FAMILIAR, GENERATION_NEUTRAL, MODEL_NEUTRAL, PASSED_OVER, REQUIRED

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_DTYPES = ("float32", "float16", "bfloat16")
_SUPPORTED = "this decoder supports Llama- and Qwen2-style checkpoints only; choose another --model"


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants of one decoder; immutable and complete (no field depends on the file any more)."""

    architecture: str
    """``"LlamaForCausalLM"`` or ``"Qwen2ForCausalLM"``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    """Decoder layers, the multi-token-prediction layer not counted."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    """Positions 0 to this number less one are accepted."""
    tie_word_embeddings: bool
    """The output head is the embedding matrix."""
    qkv_bias: bool
    """Query, key and value projections have a bias (Qwen2 always; Llama with ``attention_bias``)."""
    output_bias: bool
    """The attention's output projection has a bias (Llama with ``attention_bias``)."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_nextn_predict_layers: int
    """Multi-token-prediction layers in the checkpoint: 0 or 1."""
    notes: tuple[str, ...] = ()
    """Lines for the user: what the files say that changes nothing here, and what is not followed."""

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head (grouped-query attention, Ainslie et al. 2023)."""
        return self.num_attention_heads // self.num_key_value_heads


def read_config(directory: Path) -> LlamaConfig:
    """Read ``config.json`` of ``directory``, and ``generation_config.json`` if there is one.

    The end tokens are those of ``generation_config.json`` where it has them, else those of ``config.json``. What else
    it holds are defaults for sampling; they are not followed, and ``notes`` names those that would matter.
    Raises ``InvalidValue`` that names the file and the field for anything missing, malformed or not supported.
    """
    if not directory.is_dir():
        raise InvalidValue(
            f"no directory {str(directory)!r}", cure="give a directory with config.json", argument="--model"
        )
    config = parse_config(read_json(directory / "config.json"), source=str(directory / "config.json"))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    fields = _Fields(read_json(generation), str(generation))
    ends = fields.token_ids("eos_token_id", config.vocab_size)
    config = replace(config, eos_token_ids=ends or config.eos_token_ids)
    unheeded = [f"{n} = {fields.shown(n)}" for n in GENERATION_NEUTRAL if not fields.neutral(n)]
    if not unheeded:
        return config
    note = f"{generation.name}: not followed: {', '.join(unheeded)} (sampling is what the options say)"
    return replace(config, notes=(*config.notes, note))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``InvalidValue`` names the path when there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidValue("no such file", cure="a checkpoint directory needs it", argument=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValue(f"cannot be read: {error}", cure="restore the file", argument=str(path)) from None
    if not isinstance(content, dict):
        raise InvalidValue("is not a JSON object", cure="restore the file", argument=str(path))
    return content


def parse_config(fields: Mapping[str, Any], *, source: str = "config.json") -> LlamaConfig:
    """Validate the fields of ``config.json``; ``source`` is named in errors."""
    given = _Fields(fields, source)
    architecture = _architecture(given)
    hidden = given.count("hidden_size")
    heads = given.count("num_attention_heads")
    groups = given.count("num_key_value_heads", default=heads)
    if heads % groups:
        given.refuse("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    head_dim = given.count("head_dim", default=hidden // heads)
    if "head_dim" not in given and hidden % heads:
        given.refuse("num_attention_heads", f"does not divide hidden_size={hidden}, and there is no head_dim")
    if head_dim % 2:
        given.refuse("head_dim", "must be even for rotary positions")
    vocab = given.count("vocab_size")
    layers = given.count("num_hidden_layers")
    qwen = architecture == _ARCHITECTURES["qwen2"]
    bias = given.flag("attention_bias", default=qwen)
    if qwen and not bias:
        given.refuse("attention_bias", "must be true or absent: Qwen2 projections have a bias")
    beginning = given.token_ids("bos_token_id", vocab)
    if len(beginning) > 1:
        given.refuse("bos_token_id", "must be one id")
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=given.count("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=given.number("rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(given),
        max_position_embeddings=given.count("max_position_embeddings"),
        tie_word_embeddings=given.flag("tie_word_embeddings", default=False),
        qkv_bias=bias,
        output_bias=bias and not qwen,
        eos_token_ids=given.token_ids("eos_token_id", vocab),
        bos_token_id=beginning[0] if beginning else None,
        num_nextn_predict_layers=given.count("num_nextn_predict_layers", default=0, least=0),
    )
    if config.num_nextn_predict_layers > 1:
        given.refuse("num_nextn_predict_layers", "at most 1 is supported", _SUPPORTED)
    _check_attention_window(given, layers, qwen=qwen)
    _check_dtype(given)
    _check_rest(given)
    if not given.idle:
        return config
    names = ", ".join(sorted(given.idle))
    return replace(config, notes=(f"config.json: these change nothing at inference: {names}",))


_Value = TypeVar("_Value", int, float, bool)


class _Fields:
    """Typed access to the fields of one file; remembers which were read, refuses with file and field named."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        # A field that is null says nothing, so it counts as absent.
        self.given = {name: value for name, value in fields.items() if value is not None}
        self.source = source
        self.read: set[str] = set()
        self.idle: set[str] = set()
        """Fields worth a word that change nothing."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever JSON can hold
        self.read.add(name)
        return self.given.get(name)

    def neutral(self, name: str) -> bool:
        """Whether this generation default leaves a greedy answer as it is."""
        return name not in self.given or self.given[name] in GENERATION_NEUTRAL[name]

    def shown(self, name: str) -> str:
        """The field's value, cut to what a line can hold."""
        shown = repr(self.given[name]) if name in self.given else "absent"
        return shown if len(shown) <= 80 else shown[:77] + "..."

    def refuse(self, name: str, why: str, cure: str = "correct the field") -> NoReturn:
        raise InvalidValue(f"{self.shown(name)}: {why}", cure=cure, argument=f"{self.source}: {name}")

    def _value(self, name: str, default: _Value | None, accept: Callable[[Any], bool], kind: str) -> _Value:
        value = self.get(name)
        if value is None:
            if default is None:
                self.refuse(name, f"{kind} is required")
            return default
        if not accept(value):
            self.refuse(name, f"must be {kind}")
        return value  # type: ignore[no-any-return]  # accept has just proved it

    def count(self, name: str, *, default: int | None = None, least: int = 1) -> int:
        kind = f"a whole number of at least {least}"
        return int(self._value(name, default, lambda v: type(v) is int and least <= v < 2**31, kind))

    def number(self, name: str, *, default: float | None = None) -> float:
        def accept(value: object) -> bool:
            return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value > 0

        return float(self._value(name, default, accept, "a finite number above 0"))

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._value(name, default, lambda v: type(v) is bool, "true or false"))

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            self.refuse(name, f"must be a token id below vocab_size={vocab}, or a list of them")
        return tuple(ids)


def _architecture(given: _Fields) -> str:
    kind = given.get("model_type")
    named = given.get("architectures")
    if named is None and isinstance(kind, str) and kind in _ARCHITECTURES:
        return _ARCHITECTURES[kind]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _ARCHITECTURES.values():
        given.refuse("architectures", f"must be one of {sorted(_ARCHITECTURES.values())}", _SUPPORTED)
    if kind is not None and (not isinstance(kind, str) or _ARCHITECTURES.get(kind) != named[0]):
        given.refuse("model_type", f"does not belong to {named[0]}", _SUPPORTED)
    return str(named[0])


def _rope_theta(given: _Fields) -> float:
    """The base of rotary positions; a scaling that changes them is refused. Newer files keep both in one object."""
    base = given.number("rope_theta", default=10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            given.refuse(name, "must be an object", _SUPPORTED)
        _check_scaling(given, name, _Fields(rope, f"{given.source}: {name}"))
        inner = _Fields(rope, f"{given.source}: {name}").number("rope_theta", default=base)
        if "rope_theta" in given and inner != base:
            given.refuse("rope_theta", f"{name} says {inner}", "keep the right one of the two")
        base = inner
    return base


# What may stand beside the factor of a scaling, and says nothing when the factor is 1.
_BESIDE_FACTOR: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(),
    "dynamic": frozenset(),
    "llama3": frozenset(["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    "yarn": frozenset(["beta_fast", "beta_slow", "truncate"]),
}


def _check_scaling(given: _Fields, name: str, rope: _Fields) -> None:
    """Refuse a scaling of rotary positions unless it leaves all of them as they are.

    That is: none, a factor of 1, or a dynamic one, which begins where ``max_position_embeddings`` ends.
    """
    kinds = [rope.given[key] for key in ("rope_type", "type") if key in rope] or ["default"]
    kind = kinds[0]
    if not isinstance(kind, str) or any(other != kind for other in kinds) or kind not in _BESIDE_FACTOR:
        given.refuse(name, "only the type 'default' is supported", _SUPPORTED)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"} | _BESIDE_FACTOR[kind]
    if not known.issuperset(rope.given) or rope.given.get("partial_rotary_factor", 1) != 1:
        given.refuse(name, "only the default rotary positions are supported", _SUPPORTED)
    if kind == "default" and "factor" not in rope:
        return
    factor = rope.number("factor")
    if factor != 1 and kind != "dynamic":
        given.refuse(name, "rotary positions are supported without scaling only (a factor of 1)", _SUPPORTED)
    given.idle.add(name)


def _check_attention_window(given: _Fields, layers: int, *, qwen: bool) -> None:
    """Sliding windows are refused where they would hide a position; as long as the context they hide none."""
    window = given.count("sliding_window", default=2**31 - 1)
    idle = window >= given.count("max_position_embeddings")
    used = given.flag("use_sliding_window", default=not qwen and "sliding_window" in given)  # Qwen2's own default: no
    first = given.count("max_window_layers", default=0, least=0)  # of the layers that have a window
    if used and not idle and not (qwen and first >= layers):
        given.refuse("sliding_window", "sliding-window attention is not supported", _SUPPORTED)
    kinds = given.get("layer_types")
    allowed = ("full_attention", "sliding_attention") if idle and "sliding_window" in given else ("full_attention",)
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds)
    ):
        given.refuse("layer_types", "only 'full_attention', once for each layer, is supported", _SUPPORTED)
    if used or (kinds is not None and "sliding_attention" in kinds):
        given.idle.add("sliding_window")


def _check_dtype(given: _Fields) -> None:
    for name in ("torch_dtype", "dtype"):
        if given.get(name) not in (None, *_DTYPES):
            given.refuse(name, f"must be one of {list(_DTYPES)}", _SUPPORTED)


def _check_rest(given: _Fields) -> None:
    for name in given.given:
        if name in REQUIRED:
            _require(given, name, REQUIRED[name], _SUPPORTED)
            if given.given[name] != REQUIRED[name][0]:
                given.idle.add(name)
        elif name in MODEL_NEUTRAL:
            _require(given, name, MODEL_NEUTRAL[name], _SUPPORTED)
            given.idle.add(name)
        elif name in GENERATION_NEUTRAL:
            cure = "remove it: how to generate is said by the request (hal run --help), not by the model"
            _require(given, name, GENERATION_NEUTRAL[name], cure)
            given.idle.add(name)
        elif name in PASSED_OVER:
            given.idle.add(name)
        elif name not in given.read and name not in FAMILIAR:
            given.refuse(name, "this field is not known", f"remove it if it changes nothing at inference; {_SUPPORTED}")


def _require(given: _Fields, name: str, allowed: tuple[Any, ...], cure: str) -> None:
    if given.given[name] not in allowed:
        given.refuse(name, f"must be {' or '.join(map(repr, allowed)) or 'absent'}", cure)
