"""The table of a slot's fields in docs/worker.md, made from STATE_TABLE: running this writes it there."""

from __future__ import annotations

from pathlib import Path

from hal_core.slots.fields import STATE_TABLE, Field

PAGE = Path(__file__).parents[1] / "docs" / "worker.md"
WRITTEN = {"sampled_token_ids", "accept_tokens", "accept_num", "topk_token_ids", "topk_logprobs", "topk_ranks"}
"""Fields that a step writes; all others are written by ``insert_tasks``, ``update_inputs`` and ``set_drafts``."""
_HEAD = (
    "| field | type | elements a slot | a step | ranks share it | in the record | sampling parameter |",
    "|---|---|---|---|---|---|---|",
)


def row(field: Field) -> str:
    """One field's line."""
    shared = {"broadcast": "yes", "broadcast_speculative": "with drafts"}
    step = [word for word, does in (("reads", "step_input" in field.groups), ("writes", field.name in WRITTEN)) if does]
    cells = (
        f"`{field.name}`",
        field.dtype.name,
        str(field.width),
        " and ".join(step) or ("reads rows" if not field.groups else ""),
        next((text for name, text in shared.items() if name in field.groups), ""),
        "yes" if "output" in field.groups else "with log-probabilities" if "output_topk" in field.groups else "",
        f"`{field.param}`" if field.param else "",
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """The whole table."""
    return "\n".join([*_HEAD, *map(row, STATE_TABLE)])


def written(page: str) -> str:
    """The page with the table of today."""
    before, mark, _ = page.partition("by `python tools/state_table.py`.")
    return f"{before}{mark}\n\n{table()}\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
