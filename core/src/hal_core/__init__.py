"""The device-agnostic contract of hal: what a worker needs.

The core has three more public packages: :mod:`hal_core.devices` for device plugins, :mod:`hal_core.frames` for
transports and readers, :mod:`hal_core.handover` for transfers of keys and values. Other distributions import only these
four.
"""

from __future__ import annotations

from .lazy import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.contract.capabilities": "Capabilities",
        "hal_core.contract.counters": "Counters",
        "hal_core.contract.device": "Device Plugin Probe",
        "hal_core.contract.markers": "hookimpl",
        "hal_core.contract.support": "Support",
        "hal_core.errors": """
            CapabilityMissing ContractMismatch ConversionRefused DeviceClosed DeviceNotFound FrameError GroupLost
            HalError InvalidBatch InvalidValue OutOfMemory PluginError ShapeMismatch SinkClosed SinkFull
            StateUnusable TicketTimeout Unavailable Undelivered trace_of
            """,
        "hal_core.group": "ALONE Group",
        "hal_core.memory.dtypes": "DType",
        "hal_core.memory.views": "ByteRange View",
        "hal_core.memory.writes": "SlotRuns Writes",
        "hal_core.output.records": "OutputRecord OutputRow SlotStatus",
        "hal_core.output.sinks": "MemorySink Sink",
        "hal_core.output.ticket": "OutputTicket",
        "hal_core.runtime.bound": "BoundDevice bind",
        "hal_core.runtime.captured_update": "CapturedUpdate",
        "hal_core.slots.admission": "AdmittedRequest Request admit draw_seed",
        "hal_core.slots.declared": "Companion StateField",
        "hal_core.slots.fields": "FinishReason StateConfig SplitRole",
        "hal_core.slots.layout": "StateLayout lay_out",
        "hal_core.slots.sampling_params": "PARAMS Param SamplingParams",
        "hal_core.slots.state": "SlotState",
        "hal_core.slots.step": "Step predict_launch_tokens",
        "hal_core.slots.tasks": "ENTERING FEEDING LEAVING Task TaskBatch TaskKind",
        "hal_core.streams": "Event Stream TimedEvent",
        "hal_core.tickets": "DONE Ticket",
        "hal_core.timeouts": "CoreTimeouts Seconds TIMEOUTS",
    },
)
