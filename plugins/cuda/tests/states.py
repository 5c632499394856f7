"""What tests of several files do with a state: its bytes, batches that enter it, a group without other ranks."""

from hal_core import ByteRange, TaskBatch


def contents(bound, state):
    """Return a copy of all fields of a state, by name."""
    span = ByteRange(0, state.layout.nbytes)
    copied = bound.copy_out(memory=state.memory, parts=[span], stream=bound.default_stream)
    copied.wait(30)
    return {name: column.copy() for name, column in state.columns(copied.data[0], span).items()}


def prefill(slots, requests, block_size=8):
    """Return a batch in which requests enter as a whole."""
    lengths = [one.total for one in requests]
    return TaskBatch.prefill(slots, requests, lengths, [range(-(-length // block_size)) for length in lengths])


def is_staged(device, request):
    table = device.staged_requests.table
    return table[request.admission_id % len(table)][0] == request.admission_id


class Alone:
    """Collectives of a group whose remaining ranks send the same values as this one."""

    def exchange(self, block):
        return {0: block, 1: block}
