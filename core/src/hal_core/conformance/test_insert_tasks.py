"""``insert_tasks``: G8 to G12."""

from __future__ import annotations

from .backdoor import PATIENCE
from .batches import draw_batch
from .guarantees import guarantee
from .kit import Draw, Kit, examples
from .rig import Rig
from .stepping import free_ended, run_step
from .strategies import sizes
from hypothesis import strategies as st


@guarantee(9)
@examples()
def test_g09_every_field_of_every_slot_is_as_the_model_says(kit: Kit, draw: Draw) -> None:
    rig = Rig(kit, draw(sizes(), "sizes"))
    for _ in range(draw(st.integers(1, 4), "rounds")):
        tasks = draw_batch(draw, rig)
        rig.insert(tasks).wait(PATIENCE)
        rig.check(f"insert_tasks({tasks})")
        step = run_step(draw, rig)
        rig.output(step)
        rig.check("save_output")
        free_ended(rig)
