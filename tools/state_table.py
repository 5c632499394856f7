"""docs/slot-fields.md, the fields of a slot, made from STATE_TABLE: running this writes the page."""

from __future__ import annotations

from pathlib import Path

from hal_core.slots.fields import CLEANUP_FIELDS, ROW_FIELDS, STATE_TABLE, Field
from hal_core.slots.update import WRITES

PAGE = Path(__file__).parents[1] / "docs" / "slot-fields.md"
STEP = {"sampled_token_ids", "accept_tokens", "accept_num", "topk_token_ids", "topk_logprobs", "topk_ranks"}
"""Fields that a step writes, which is a runner's work."""
DRAFTS = {"draft_num", "draft_tokens", "seq_lens_this_time"}
"""Fields that ``set_drafts`` writes."""
HEAD = """# The fields of a slot

Made from `STATE_TABLE` (`core/src/hal_core/slots/fields.py`) by `python tools/state_table.py`.

A slot holds one running request. Each field is one array `[slots, width]` in the state's memory: a runner on the device
reads and writes it in place, one on the host by copies ([a runner](runner.md), [a worker](worker.md)). A step reads the
fields marked *in* and the rows of `token_ids`. Ranks share the fields marked *ranks* (*drafts*: in a state with drafts)
after each step; those marked *out* are in the step's record (*logprobs*: with log-probabilities). The writers, in the
order of a step:

- **insert**: `insert_tasks`, as a request enters, grows or leaves.
- **step**: the runner; nothing else is its to write.
- **update**: `update_inputs`, after `broadcast_tokens`: it takes the step's tokens and moves the lengths on.
- **drafts**: `set_drafts`, or a runner that drafts on the device.
- **save**: `save_output`, which cleans up.

| field | type | width | what it means | written by | groups | parameter |
|---|---|---|---|---|---|---|
"""


def writers(field: Field) -> str:
    """Who writes a field, in the order of a step."""
    name = field.name
    found = {
        "insert": field.record or name in (*ROW_FIELDS, *CLEANUP_FIELDS),
        "step": name in STEP,
        "update": name in (*WRITES, "token_ids"),
        "drafts": name in DRAFTS,
        "save": name in CLEANUP_FIELDS,
    }
    return ", ".join(who for who, writes in found.items() if writes)


def row(field: Field) -> str:
    """One field's line."""
    marks = {
        "step_input": "in",
        "broadcast": "ranks",
        "broadcast_speculative": "" if "broadcast" in field.groups else "drafts",
        "output": "out",
        "output_topk": "" if "output" in field.groups else "logprobs",
    }
    groups = ", ".join(mark for group, mark in marks.items() if mark and group in field.groups)
    param = f"`{field.param}`" if field.param else ""
    about = field.about.rstrip(".")
    cells = (f"`{field.name}`", field.dtype.name, str(field.width), about, writers(field), groups, param)
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(map(row, STATE_TABLE)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
