"""The four hooks. Each docstring is the full text of the hook's guarantees, which a plugin fulfils.

Every hook takes its arguments by keyword, has no defaults and returns a :class:`~hal_core.tickets.Ticket`, never None.
The policy around each hook (checks, who sends, when to clean up) is :mod:`hal_core.runtime.policy` and is the same on
every device. It calls a plugin's hook with checked arguments, at most once per call, and the hook only moves bytes.
Observers (:mod:`hal_core.runtime.observers`) receive the caller's own objects, and must not write to them.

A step's calls come in this order: ``insert_tasks``; the model and its sampler; ``broadcast_tokens``; ``update_inputs``;
then ``save_output``, and ``set_drafts`` before or after it. ``set_drafts`` is not a hook but, like ``update_inputs``, a
call of the opened device that all ranks make alike. It gives a state the drafts that its next step verifies: their
tokens, their number and that step's inputs (``seq_lens_this_time``: the next token and the drafts), in one submission.
It names the step whose tokens the drafts follow. It comes once, after that step's ``update_inputs``, which drops
earlier drafts, and before the next one's. For a slot with role PREFILL it comes before ``save_output``, whose record
includes its drafts. A call out of this order is an error, and so is a plain step of a state whose slots have drafts: no
draft is lost silently.

For all hooks:

- G26: An error names device, hook and argument, and the cure. A stream that another opened device made is refused
  before anything is queued; its events may be waited for.
- G27: The core imports no device and asks for capabilities, never for a device's name.
- G28: No write reaches a slot before the last step that reads it has passed its event; the core owns this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .markers import hookspec

if TYPE_CHECKING:
    from ..group import Group
    from ..memory.values import Value
    from ..memory.views import View
    from ..output.sinks import Sink
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import TaskBatch
    from ..streams import Stream
    from ..tickets import Ticket
    from .device import Device


@hookspec(firstresult=True)
def broadcast_tokens(device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:  # type: ignore[empty-body]
    """Make all ranks of a tensor-parallel group agree with its first rank.

    - G13: afterwards every broadcast field is equal on all ranks of the group, byte for byte; other groups are
      untouched. A state without drafts has one such field: ``sampled_token_ids``. A state with drafts also has
      ``accept_tokens``, ``accept_num``, ``step_idx`` and ``stop_flags``. All of them are sent at each call, so the
      ranks agree for plain and speculative steps. The list is data, in the slot table; the source is ``group.source``.
    - G14: each call is one collective of fixed size, however many fields, over one slice of the state. The slice begins
      with a 64-byte header (digest of the shared configuration, number of the broadcast, updates of the state) that is
      checked when the ticket completes. On a mismatch the state is marked unusable, the ticket raises, and no output of
      that step is sent.
    - G15: a group of one communicates nothing; the plugin is then not called.
    - G16: a lost or hung peer gives an error on every surviving rank within the timeout that was set.

    :param device: the opened device.
    :param state: the slot state whose broadcast slice is sent; it depends on whether the state has drafts
        (``speculative``).
    :param group: the caller's tensor-parallel group.
    :param stream: the stream whose order counts: earlier work is seen, later work sees the result.
    :return: done when the fields agree; raises :class:`hal_core.errors.GroupLost` or
        :class:`hal_core.errors.StateUnusable` when waited for.
    """


@hookspec(firstresult=True)
def save_output(device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:  # type: ignore[empty-body]
    """Hand the step's tokens to the engine: copied out, cleaned up after that copy, queued for sending.

    - G17: only the first rank of a tensor-parallel group sends, on every path.
    - G18: the step's clean-up (``last_preempted``, ``last_aborted``) happens on every rank, also where no output is
      sent and where sending fails.
    - G19: each token of each request is delivered once, in order, or reported as undeliverable by request and position.
      Each preemption is reported once, also when the whole batch is preempted.
    - G20: rows are in batch-id order, whatever slot order the step ran under.
    - G21: bounds that the host knows raise at the call; those on the device are checked before encoding and raised by
      the ticket. No value out of bounds is ever written or sent. A token id that is negative, or not below a known
      ``vocab_size``, is no violation but an error of its request: its row reports it, the ticket does not raise, and
      later records do not mention that request.
    - G22: a frame contains no data of an earlier step.
    - G23: the compute stream is not stalled. A full or dead sink follows the sink's policy: wait up to a deadline, then
      :class:`hal_core.errors.SinkFull`, with the record kept. No record is dropped silently.
    - G24: a prefill node reports first token, drafts and log-probabilities aligned with token 0; a count is the number
      of tokens, always.
    - G25: none, naive, n-gram, suffix and MTP go through the same record; no path needs a proposer to exist.

    :param device: the opened device.
    :param state: the slot state that holds the output fields.
    :param step: the step: its number, the order of its rows, and its options.
    :param sink: takes the step's one :class:`hal_core.frames.PendingOutput`: call ``sink.put`` once. It is never the
        caller's own sink: the policy keeps the output, cleans up, and then passes it on if this rank sends.
    :param stream: the stream the step was computed on.
    :return: done when the record is encoded and queued for the wire; raises for values out of bounds.
    """


@hookspec(firstresult=True)
def async_set_value(device: Device, target: View, value: Value, stream: Stream) -> Ticket:  # type: ignore[empty-body]
    """Write a value into a device tensor or a view of it.

    - G1: work put on ``stream`` after the call sees the value; the host sees it after ``ticket.wait()``.
    - G2: the caller may change or free ``value`` as soon as the call returns. A value already on the device is read in
      stream order. A framework's tensor, value or target, may be dropped then, whatever stream it was allocated on.
    - G3: with ``async_h2d`` the call returns while the stream is held. When the staging ring is full, the call waits
      only for the oldest entry and counts that wait. After a deadline it raises, with no part of the write queued. The
      same holds when the stream's own queue is full. A value larger than the ring is copied through device memory, up
      to ``value_limit`` bytes. For a larger value the call first waits for its stream, up to the deadline.
    - G4: calls on one stream take effect in order; of two writes to one place the last wins.
    - G5: not one byte outside the target changes: strided and reversed views, row tails, neighbours. A target with
      overlapping elements (an expanded tensor) is refused, as the result would be undefined.
    - G6: scalars fill; lists, arrays and tensors are reshaped when the element count fits; types convert by class, by
      value (:mod:`hal_core.memory.convert`); everything else is refused. A value on the device must have the target's
      dtype and is not inspected.
    - G7: without ``async_h2d`` the value is there on return, ``mode`` is "sync", there is one log record per opened
      device, and the reason is in ``capabilities.fallbacks["async_set_value"]``.

    :param device: the opened device.
    :param target: the view to write: any shape and strides, of the target's dtype.
    :param value: the converted value: one element that fills, a C-contiguous array of the target's shape, or a view of
        device memory. The array may be the caller's own: the hook has read it when it returns.
    :param stream: the stream whose order counts.
    :return: done when the bytes are in place.
    """


@hookspec(firstresult=True)
def insert_tasks(device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:  # type: ignore[empty-body]
    """Put prefill, decode, preempted and aborted requests into their slots.

    - G8: all or nothing: an invalid batch changes no slot, and the error lists every problem.
    - G9: every field of every named slot equals the reference model afterwards; every other slot is untouched. A
      state's companions hold the same requests, each in the companion's own slot or, declared so, the
      target's; one call serves them all. Fields that a worker declares (``device.state(fields=…)``) count as well.
    - G10: with ``fused_scatter`` the number of submissions does not grow with requests or fields: at most two a call
      for each staging block it fills, and no wait for the device.
    - G11: no data of the slot's former request can be read: tails of block tables, drafts, stop sequences, bad words,
      counters. Rows are reset up to the largest length written since their last reset.
    - G12: in a prefill/decode split the prefill role stops after the first token. The decode role continues after it
      once the task declares its blocks present (``num_computed_tokens``). Exactly the given drafts are written, here
      and by ``set_drafts``. A host mirror of a field equals the device as of the last step whose output was taken.

    :param device: the opened device.
    :param state: the slot state to write.
    :param tasks: the batch, checked by the policy. Save the output of a slot's last step before its request leaves:
        output that is still in the slot's fields is lost with it.
    :param stream: the stream whose order counts: later steps see the requests, earlier ones do not.
    :return: done when every field is in place.
    """
