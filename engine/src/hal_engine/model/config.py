"""``config.json`` of a Llama-, Mistral-, Qwen2- or Qwen3-style checkpoint, parsed and validated without any framework.

Every field of the file must be known: it is used, or it has no effect on inference, or it must have the one value that
this decoder implements. Anything else is refused with the field named, because a model with an ignored field runs and
writes nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hal_core import InvalidValue

from hal_engine.model.config_fields import FAMILIAR, GENERATION_NEUTRAL, MODEL_NEUTRAL, PASSED_OVER, REQUIRED
from hal_engine.model.fields import SUPPORTED, Fields, read_json
from hal_engine.model.files import check_formats
from hal_engine.model.rope import Rope, read_rope

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class _Family:
    """Properties of an architecture, and the defaults of absent fields, as in transformers."""

    architecture: str
    bias: bool | None = None
    """Whether query, key and value have a bias; None: by ``attention_bias``, and then the output has one too."""
    head_dim: int | None = None
    """None: ``hidden_size / num_attention_heads``."""
    qk_norm: bool = False
    window: int | None = None
    """Window of a file without that field."""
    window_is_optional: bool = False
    """A window counts only with ``use_sliding_window``, and starting at layer ``max_window_layers``."""


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", bias=False, window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", bias=True, window_is_optional=True),
    "qwen3": _Family("Qwen3ForCausalLM", head_dim=128, qk_norm=True, window_is_optional=True),
}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What an engine needs of a checkpoint, whichever runner computes the model; independent of the file."""

    vocab_size: int
    max_position_embeddings: int
    """Positions 0 to this number less one are accepted."""
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int = 0
    """Multi-token-prediction layers in the checkpoint: 0 or 1."""
    notes: tuple[str, ...] = ()
    """Lines for the user: fields of the files without effect here, and fields that are not followed."""


_Config = TypeVar("_Config", bound=TextConfig)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextConfig):
    """The sizes and constants of one decoder; immutable and complete (independent of the file)."""

    architecture: str
    """``"LlamaForCausalLM"``, or that of Mistral, Qwen2 or Qwen3."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    """Decoder layers, not counting the multi-token-prediction layer."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    """The rotary positions, including their scaling."""
    tie_word_embeddings: bool
    """The output head is the embedding matrix."""
    qk_norm: bool
    """Each head's query and key is normed before the rotation by its position (Qwen3)."""
    qkv_bias: bool
    """Query, key and value projections have a bias (Qwen2 always; Llama and Qwen3 with ``attention_bias``)."""
    output_bias: bool
    """The attention's output projection has a bias (Llama and Qwen3 with ``attention_bias``)."""

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head (grouped-query attention, Ainslie et al. 2023)."""
        return self.num_attention_heads // self.num_key_value_heads


def read_config(directory: Path) -> LlamaConfig:
    """Read ``config.json`` of ``directory``, and its ``generation_config.json`` if present.

    The end tokens are those of ``generation_config.json`` if it has them, else those of ``config.json``. Its other
    fields are defaults for sampling; they are not followed, and ``notes`` names those that would matter.

    Raises ``InvalidValue`` naming the file and the field for anything missing, malformed or not supported.
    """
    check_formats(directory)
    fields, source = _fields_of(directory)
    return _with_ends(parse_config(fields, source=source), directory)


def read_text_config(directory: Path, longest: int | None) -> TextConfig:
    """As :func:`read_config`, of a checkpoint that a runner of its own computes: the other fields are the runner's.
    ``longest``: ``max_position_embeddings`` (GPT-2's ``n_positions``) if the file has none."""
    given = Fields(*_fields_of(directory))
    vocab, name = given.count("vocab_size"), "n_positions" if "n_positions" in given else "max_position_embeddings"
    if name not in given and longest is None:
        given.refuse(name, "a whole number is required", "add the field, or give --max-model-len")
    longest, ends = given.count(name, default=longest), given.token_ids("eos_token_id", vocab)
    return _with_ends(TextConfig(vocab_size=vocab, max_position_embeddings=longest, eos_token_ids=ends), directory)


def _fields_of(directory: Path) -> tuple[dict[str, Any], str]:
    """Return what ``config.json`` has, and the file's name."""
    if not (path := directory / "config.json").exists():
        what = f"no {'config.json in' if directory.is_dir() else 'directory'} {str(directory)!r}"
        raise InvalidValue(what, cure="give the directory of a checkpoint", argument="--model")
    return read_json(path), str(path)


def _with_ends(config: _Config, directory: Path) -> _Config:
    """Return the configuration with the end tokens and the note of ``generation_config.json``."""
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    fields = Fields(read_json(generation), str(generation))
    ends = fields.token_ids("eos_token_id", config.vocab_size)
    config = replace(config, eos_token_ids=ends or config.eos_token_ids)
    unheeded = [f"{n} = {fields.shown(n)}" for n in GENERATION_NEUTRAL if not fields.says(n, GENERATION_NEUTRAL[n])]
    if not unheeded:
        return config
    note = f"{generation.name}: not followed: {', '.join(unheeded)} (the options determine sampling)"
    return replace(config, notes=(*config.notes, note))


def parse_config(fields: Mapping[str, Any], *, source: str = "config.json") -> LlamaConfig:
    """Validate the fields of ``config.json``; ``source`` is named in errors."""
    given = Fields(fields, source)
    family = _family(given)
    hidden = given.count("hidden_size")
    heads = given.count("num_attention_heads")
    groups = given.count("num_key_value_heads", default=heads)
    if heads % groups:
        given.refuse("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    vocab = given.count("vocab_size")
    layers = given.count("num_hidden_layers")
    bias = _bias(given, family)
    if len(given.token_ids("bos_token_id", vocab)) > 1:
        given.refuse("bos_token_id", "must be one id")
    config = LlamaConfig(
        architecture=family.architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=given.count("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=_head_dim(given, family, hidden, heads),
        rms_norm_eps=given.number("rms_norm_eps", default=1e-6),
        rope=read_rope(given),
        max_position_embeddings=given.count("max_position_embeddings"),
        tie_word_embeddings=given.flag("tie_word_embeddings", default=False),
        qk_norm=family.qk_norm,
        qkv_bias=bias,
        output_bias=bias and family.bias is None,
        eos_token_ids=given.token_ids("eos_token_id", vocab),
        num_nextn_predict_layers=given.count("num_nextn_predict_layers", default=0, least=0),
    )
    if config.num_nextn_predict_layers > 1:
        given.refuse("num_nextn_predict_layers", "at most 1 is supported", SUPPORTED)
    _check_attention_window(given, layers, family)
    _check_dtype(given)
    _check_rest(given)
    if not given.idle:
        return config
    names = ", ".join(sorted(given.idle))
    return replace(config, notes=(f"config.json: these change nothing at inference: {names}",))


def _family(given: Fields) -> _Family:
    kind = given.get("model_type")
    named = given.get("architectures")
    by_name = {family.architecture: family for family in _FAMILIES.values()}
    if named is None and isinstance(kind, str) and kind in _FAMILIES:
        return _FAMILIES[kind]
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in by_name:
        given.refuse("architectures", f"must be one of {sorted(by_name)}", SUPPORTED)
    family = by_name[named[0]]
    if kind is not None and (not isinstance(kind, str) or _FAMILIES.get(kind) != family):
        given.refuse("model_type", f"does not belong to {named[0]}", SUPPORTED)
    return family


def _head_dim(given: Fields, family: _Family, hidden: int, heads: int) -> int:
    if "head_dim" not in given and family.head_dim is None and hidden % heads:
        given.refuse("num_attention_heads", f"does not divide hidden_size={hidden}, and there is no head_dim")
    head_dim = given.count("head_dim", default=family.head_dim or hidden // heads)
    if head_dim % 2:
        given.refuse("head_dim", "must be even for rotary positions")
    return head_dim


def _bias(given: Fields, family: _Family) -> bool:
    bias = given.flag("attention_bias", default=bool(family.bias))
    if family.bias is not None and bias != family.bias:
        have = "have a" if family.bias else "have no"
        only = "true" if family.bias else "false"
        given.refuse("attention_bias", f"must be {only} or absent: projections of {family.architecture} {have} bias")
    return bias


def _check_attention_window(given: Fields, layers: int, family: _Family) -> None:
    """Refuse sliding windows that would hide a position; windows as long as the context hide none."""
    absent = family.window is not None and "sliding_window" not in given.null
    window = given.count("sliding_window", default=family.window if absent else 2**31 - 1)
    idle = window >= given.count("max_position_embeddings")
    flag = given.flag("use_sliding_window", default=not family.window_is_optional and "sliding_window" in given)
    used = flag or family.window is not None  # where a family has windows by itself, no flag takes them away
    first = given.count("max_window_layers", default=0, least=0)  # of the layers that have a window
    if used and not idle and not (family.window_is_optional and first >= layers):
        stands = "" if "sliding_window" in given else f"which stands for {window}: "
        given.refuse("sliding_window", f"{stands}sliding-window attention is not supported", SUPPORTED)
    kinds = given.get("layer_types")
    allowed = ("full_attention", "sliding_attention") if idle and "sliding_window" in given else ("full_attention",)
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds)
    ):
        given.refuse("layer_types", "only 'full_attention', once for each layer, is supported", SUPPORTED)
    if "sliding_window" in given and (used or (kinds is not None and "sliding_attention" in kinds)):
        given.idle.add("sliding_window")


def _check_dtype(given: Fields) -> None:
    for name in ("torch_dtype", "dtype"):
        if given.get(name) not in (None, *_DTYPES):
            given.refuse(name, f"must be one of {list(_DTYPES)}", SUPPORTED)


def _check_rest(given: Fields) -> None:
    for name in given.given:
        if name in REQUIRED:
            _require(given, name, REQUIRED[name], SUPPORTED)
            if given.given[name] != REQUIRED[name][0]:
                given.idle.add(name)
        elif name in MODEL_NEUTRAL:
            _require(given, name, MODEL_NEUTRAL[name], SUPPORTED)
            given.idle.add(name)
        elif name in GENERATION_NEUTRAL:
            cure = "remove it: the request determines the generation (hal run --help), not the model"
            _require(given, name, GENERATION_NEUTRAL[name], cure)
            given.idle.add(name)
        elif name in PASSED_OVER:
            given.idle.add(name)
        elif name not in given.read and name not in FAMILIAR:
            given.refuse(name, "this field is not known", f"remove it if it changes nothing at inference; {SUPPORTED}")


def _require(given: Fields, name: str, allowed: tuple[Any, ...], cure: str) -> None:
    if given.given[name] not in allowed:
        given.refuse(name, f"must be {' or '.join(map(repr, allowed)) or 'absent'}", cure)
