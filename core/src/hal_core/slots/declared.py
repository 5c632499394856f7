"""Fields that a worker declares for its state, besides the slot table's (``device.state(sizes, fields=[…])``).

A declared field is one more line of the slot table. It is part of a request's packed record, so all code for records
handles it on every device: insertion, reset, leaving. Its groups determine its place in the state, and so whether it is
copied out, mirrored and broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import HalError, InvalidValue
from ..memory.convert import convert_scalar
from ..memory.dtypes import dtype_of
from .fields import GROUPS, STATE_TABLE, Field, Source, StateConfig

WIDTHS = (
    *("max_model_len", "max_blocks", "max_accept", "max_eos", "max_bad_words", "max_stop_sequences"),
    *("max_stop_length", "max_logprobs", "max_draft_tokens", "block_size", "vocab_size"),
)
"""Sizes that a field's width may name."""

_AFTER: Mapping[str, str] = {
    "broadcast": "sampled_token_ids",
    "broadcast_speculative": "stop_flags",
    "output": "draft_tokens",
    "output_topk": "topk_ranks",
    "step_input": "block_tables",
}
"""Group to the field of the table after which a declared one is placed; one without groups is placed last. The groups'
slices are nested, so the first of these among a field's groups decides, and the field is in all slices that cover that
place."""
_WITHIN: Mapping[str, tuple[str, ...]] = {
    "broadcast": ("broadcast_speculative", "output", "output_topk", "step_input"),
    "broadcast_speculative": ("output", "output_topk", "step_input"),
    "output": ("output_topk", "step_input"),
}
"""Group to the groups whose slices contain its own."""
_OF_STEPS = frozenset(GROUPS) - {"step_input"}
"""Groups that steps read; a companion has insertions but no steps."""


@dataclass(frozen=True, slots=True)
class StateField:
    """One declared field, ``[slots, width]``.

    - ``dtype``: an element type's name; ``width``: elements per slot, a number or the name of a size of ``WIDTHS``.
    - ``reset``: the value of an empty slot, and of a row's elements after its value.
    - ``groups``: names separated by blanks: ``step_input`` (copied out with a step's inputs), ``output`` (copied out
      with each step's output, and in ``state.mirror``), ``output_topk`` (only with log-probabilities), ``broadcast``
      (made equal on all ranks after each step), ``broadcast_speculative`` (in states with drafts). A field in
      ``broadcast`` is also in ``output``, and one in ``output`` is also in ``step_input``.
    - ``value``: ``"extra"`` for ``Request.extra[name]``, a function of the request, called once at admission from any
      thread, or None: entering sets the reset value, and steps write the field. A scalar field takes a number, a row a
      list of at most ``width``.
    - ``kept``: leaving a slot (PREEMPTED, ABORTED) does not reset the field.
    """

    name: str
    dtype: str
    width: int | str = 1
    reset: float = 0
    groups: str = ""
    value: Source = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Companion:
    """A state beside the target's, with its own fields.

    ``same_slots``: a request has the target's slot there too; else the core chooses the companion's slots.
    """

    name: str
    fields: Sequence[StateField] = field(default=())
    same_slots: bool = False


def table_with(sizes: StateConfig, fields: Sequence[StateField], *, stepped: bool = True) -> tuple[Field, ...]:
    """Return the slot table with declared fields, each at the place that its groups need.

    ``stepped``: false for a companion. Raises :class:`InvalidValue` for an invalid field.
    """
    if not isinstance(fields, list | tuple):
        raise InvalidValue(f"{type(fields).__name__} is no list", cure="give [StateField(…)]", argument="fields")
    after: dict[str, list[Field]] = {}
    taken = {known.name for known in STATE_TABLE}
    for one in fields:
        if not isinstance(one, StateField):
            raise InvalidValue(f"{type(one).__name__} is no StateField", cure="give StateField(…)", argument="fields")
        if not isinstance(one.name, str) or not one.name.isidentifier():
            raise _bad(one, "has a name that is no identifier", "name it with letters, digits and _")
        if one.name in taken:
            raise _bad(one, "is in the state already", "give it a name of its own")
        taken.add(one.name)
        made = _made(sizes, one, stepped=stepped)
        after.setdefault(next((_AFTER[name] for name in _AFTER if name in made.groups), "token_ids"), []).append(made)
    return tuple([line for known in STATE_TABLE for line in (known, *after.get(known.name, ()))])


def _made(sizes: StateConfig, one: StateField, *, stepped: bool) -> Field:
    """Return a declared field's line of the slot table."""
    groups = frozenset(one.groups.split()) if isinstance(one.groups, str) else frozenset(["?"])
    if unknown := groups - set(GROUPS):
        raise _bad(one, f"names the groups {sorted(unknown)}", f"name some of {', '.join(GROUPS)}, separated by blanks")
    if "broadcast_speculative" in groups and not sizes.max_draft_tokens:
        raise _bad(one, "is in broadcast_speculative, and the state has no drafts", "name the group broadcast")
    if strange := sorted(groups & _OF_STEPS) if not stepped else []:
        raise _bad(one, f"is in {', '.join(strange)}, and no step runs on a companion", "leave it out, or step_input")
    groups = groups.union(*[_WITHIN.get(name, ()) for name in groups])
    if one.value is not None and one.value != "extra" and not callable(one.value):
        raise _bad(one, f"has the value {one.value!r}", 'give "extra", a function of the request, or None')
    try:
        dtype = dtype_of(one.dtype)
        reset = convert_scalar(one.reset, dtype)
    except HalError as error:
        raise _bad(one, f"cannot be: {error.what}", error.cure) from error
    if reset is None:
        raise _bad(one, f"has the reset value {one.reset!r}", "give one number")
    return Field(one.name, dtype, _width(sizes, one), reset.item(), groups, True, "", one.value, one.kept)


def _width(sizes: StateConfig, one: StateField) -> int:
    width = one.width
    if isinstance(width, str) and width in WIDTHS:
        width = int(getattr(sizes, width))
        if not width:
            raise _bad(one, f"has the width {one.width}, which is 0", f"give a number, or the state a {one.width}")
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width < 2**31:
        raise _bad(one, f"has the width {one.width!r}", f"give a number of at least 1, or one of {', '.join(WIDTHS)}")
    return width


def _bad(one: StateField, what: str, cure: str) -> HalError:
    return InvalidValue(f"field {one.name} {what}", cure=cure, argument="fields")
