"""One rank of two, over the simulated collectives; prints its answer as JSON. python rank.py agree|lost"""

import json
import os
import signal
import sys
import time

import numpy as np
from hal_core import StateConfig
from hal_core.errors import HalError
from hal_core.group import Group
from hal_core.memory.views import ByteRange
from hal_sim import Accelerator

import hal

rank = int(os.environ["PADDLE_TRAINER_ID"])
device = hal.open_device("maca")
state, stream, group = (
    device.state(StateConfig(num_slots=4, max_model_len=16, max_draft_tokens=2)),
    device.default_stream,
    Group((0, 1), rank),
)
device.async_set_value(target=state.view("accept_tokens"), value=np.arange(12) + 100 * rank, stream=stream)
device.async_set_value(target=state.view("seed"), value=rank, stream=stream)
device.open_group(state=state, group=group)
answer = {}
began = time.monotonic()
try:
    for count in range(6):
        if (sys.argv[1], rank, count) == ("lost", 1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        ticket = device.broadcast_tokens(state=state, group=group, stream=stream)
        ticket.wait(30)
except HalError as error:
    answer["error"] = f"{type(error).__name__}: {error}"
    answer["seconds"] = time.monotonic() - began
if sys.argv[1] == "agree":
    parts = []
    for name in ("accept_tokens", "seed"):
        place = state.layout.fields[name]
        copied = device.device.copy_out(state.memory, [ByteRange(place.offset, place.stride * 4)], stream)
        copied.wait(20)
        parts.append(copied.data[0].view(np.int64).tolist())
    answer = {"accept_tokens": parts[0], "seed": parts[1], "mode": ticket.mode}
    answer["collectives"] = device.counters().collectives
    answer["races"] = [str(race) for race in Accelerator(0).races()]
    answer["fallback"] = Accelerator(0).counters()["fallback"]
sys.stdout.write("\n" + json.dumps(answer) + "\n")
sys.stdout.flush()
if sys.argv[1] == "lost":
    os._exit(0)  # the stream still waits for the lost rank
device.close()
