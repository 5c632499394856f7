"""The oracle of a step: the effect of ``update_inputs``, one slot at a time, from its documentation."""

from __future__ import annotations

from .slots import Model

GOES_ON, STOP, LENGTH, ERROR = 0, 1, 2, 4  # the finish reasons of the contract
PREFILL = 1  # the split role whose slot gives only its first token


def update_inputs(model: Model, order: list[int], *, speculative: bool) -> None:
    """Run one step over every slot of the state; ``order``: the slots that the host believes it ran."""
    for slot in range(model.sizes.num_slots):
        if model.get("stop_flags", slot) or model.get("seq_lens_this_time", slot) == 0:
            model.set("accept_num", slot, 0)
        else:
            _run(model, slot, speculative)
    model.may_append(order, model.sizes.max_accept if speculative else 1)


def _run(model: Model, slot: int, speculative: bool) -> None:
    """Run one slot."""
    fed, known = model.get("seq_lens_encoder", slot), _known(model, slot)
    cached = model.get("seq_lens_decoder", slot) + fed
    waits = fed > 0 and cached < known
    count = 0 if waits else model.get("accept_num", slot) if speculative else 1
    tokens: list[int] = []
    reason = GOES_ON
    if not 0 <= count <= model.sizes.max_accept:
        reason = ERROR  # left unchanged, for save_output to report (G21)
    else:
        source = "accept_tokens" if speculative else "sampled_token_ids"
        most = 1 if model.get("split_role", slot) == PREFILL else count
        tokens, reason = _accepted(model, slot, model.cells[source][slot, :count].tolist()[:most])
        count = len(tokens)
        _append(model, slot, tokens)
    model.set("accept_num", slot, count)
    model.set("seq_lens_decoder", slot, cached if fed else cached + len(tokens))
    stops = reason != GOES_ON or (bool(tokens) and model.get("split_role", slot) == PREFILL)
    if stops:
        model.set("stop_flags", slot, True)
    if not waits:
        model.set("stop_reason", slot, reason)
    model.set("seq_lens_this_time", slot, 0 if waits or stops else 1)
    model.set("seq_lens_encoder", slot, 0)
    model.set("draft_num", slot, 0)


def _known(model: Model, slot: int) -> int:
    return int(model.get("prompt_lens", slot) + model.get("step_idx", slot))


def _accepted(model: Model, slot: int, offered: list[int]) -> tuple[list[int], int]:
    """Return the tokens up to the first that ends the request, and why it ends."""
    history = model.cells["token_ids"][slot, : _known(model, slot)].tolist()
    prompt, before = model.get("prompt_lens", slot), model.get("step_idx", slot)
    ends = model.cells["eos_token_ids"][slot, : model.get("eos_num", slot)].tolist()
    for at, token in enumerate(offered):
        history.append(token)
        generated = before + at + 1
        if (token in ends or _stopped(model, slot, history[prompt:])) and generated >= model.get("min_dec_len", slot):
            return offered[: at + 1], STOP
        if generated >= model.get("max_dec_len", slot) or len(history) >= model.sizes.max_model_len:
            return offered[: at + 1], LENGTH
    return offered, GOES_ON


def _stopped(model: Model, slot: int, generated: list[int]) -> bool:
    """Return True if the generated tokens end with one of the request's stop sequences."""
    rows = model.cells["stop_seqs"][slot].reshape(-1, model.sizes.max_stop_length).tolist()
    lengths = model.cells["stop_seqs_len"][slot].tolist()
    stops = [rows[i][: lengths[i]] for i in range(model.get("stop_seqs_num", slot))]
    return any(generated[-len(stop) :] == stop for stop in stops if stop and len(stop) <= len(generated))


def _append(model: Model, slot: int, tokens: list[int]) -> None:
    if not tokens:
        return
    known = _known(model, slot)
    end = known + len(tokens)
    model.cells["token_ids"][slot, known:end] = tokens
    model.written["token_ids"][slot] = max(model.written["token_ids"][slot], end)
    model.set("next_tokens", slot, tokens[-1])
    model.set("step_idx", slot, model.get("step_idx", slot) + len(tokens))
