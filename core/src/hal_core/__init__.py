"""The device-agnostic contract of hal: what a worker needs.

Three more faces: :mod:`hal_core.devices` for who writes a device, :mod:`hal_core.frames` for who writes a transport
or a
reader, :mod:`hal_core.conformance` for a device's tests. Nothing else of the core is imported by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import face

if TYPE_CHECKING:
    from .contract.capabilities import Capabilities as Capabilities
    from .contract.counters import Counters as Counters
    from .contract.device import Device as Device
    from .contract.device import Plugin as Plugin
    from .contract.device import Probe as Probe
    from .contract.markers import hookimpl as hookimpl
    from .errors import CapabilityMissing as CapabilityMissing
    from .errors import ContractMismatch as ContractMismatch
    from .errors import ConversionRefused as ConversionRefused
    from .errors import DeviceClosed as DeviceClosed
    from .errors import DeviceNotFound as DeviceNotFound
    from .errors import FrameError as FrameError
    from .errors import GroupLost as GroupLost
    from .errors import HalError as HalError
    from .errors import InvalidBatch as InvalidBatch
    from .errors import InvalidValue as InvalidValue
    from .errors import OutOfMemory as OutOfMemory
    from .errors import PluginError as PluginError
    from .errors import ShapeMismatch as ShapeMismatch
    from .errors import SinkClosed as SinkClosed
    from .errors import SinkFull as SinkFull
    from .errors import StateUnusable as StateUnusable
    from .errors import TicketTimeout as TicketTimeout
    from .errors import Unavailable as Unavailable
    from .errors import Undelivered as Undelivered
    from .group import ALONE as ALONE
    from .group import Group as Group
    from .memory.dtypes import DType as DType
    from .memory.views import ByteRange as ByteRange
    from .memory.views import View as View
    from .output.records import OutputRecord as OutputRecord
    from .output.records import OutputRow as OutputRow
    from .output.records import SlotStatus as SlotStatus
    from .output.sinks import MemorySink as MemorySink
    from .output.sinks import Sink as Sink
    from .output.ticket import OutputTicket as OutputTicket
    from .runtime.bound import BoundDevice as BoundDevice
    from .runtime.bound import bind as bind
    from .slots.admission import AdmittedRequest as AdmittedRequest
    from .slots.admission import Request as Request
    from .slots.admission import admit as admit
    from .slots.fields import FinishReason as FinishReason
    from .slots.fields import SplitRole as SplitRole
    from .slots.fields import StateConfig as StateConfig
    from .slots.layout import StateLayout as StateLayout
    from .slots.layout import lay_out as lay_out
    from .slots.sampling_params import SamplingParams as SamplingParams
    from .slots.state import SlotState as SlotState
    from .slots.step import Step as Step
    from .slots.step import predict_launch_tokens as predict_launch_tokens
    from .slots.tasks import ENTERING as ENTERING
    from .slots.tasks import LEAVING as LEAVING
    from .slots.tasks import Task as Task
    from .slots.tasks import TaskBatch as TaskBatch
    from .slots.tasks import TaskKind as TaskKind
    from .streams import Event as Event
    from .streams import Stream as Stream
    from .tickets import DONE as DONE
    from .tickets import Ticket as Ticket

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.contract.capabilities": "Capabilities",
        "hal_core.contract.counters": "Counters",
        "hal_core.contract.device": "Device Plugin Probe",
        "hal_core.contract.markers": "hookimpl",
        "hal_core.errors": """
            CapabilityMissing ContractMismatch ConversionRefused DeviceClosed DeviceNotFound FrameError GroupLost
            HalError InvalidBatch InvalidValue OutOfMemory PluginError ShapeMismatch SinkClosed SinkFull
            StateUnusable TicketTimeout Unavailable Undelivered
            """,
        "hal_core.group": "ALONE Group",
        "hal_core.memory.dtypes": "DType",
        "hal_core.memory.views": "ByteRange View",
        "hal_core.output.records": "OutputRecord OutputRow SlotStatus",
        "hal_core.output.sinks": "MemorySink Sink",
        "hal_core.output.ticket": "OutputTicket",
        "hal_core.runtime.bound": "BoundDevice bind",
        "hal_core.slots.admission": "AdmittedRequest Request admit",
        "hal_core.slots.fields": "FinishReason StateConfig SplitRole",
        "hal_core.slots.layout": "StateLayout lay_out",
        "hal_core.slots.sampling_params": "SamplingParams",
        "hal_core.slots.state": "SlotState",
        "hal_core.slots.step": "Step predict_launch_tokens",
        "hal_core.slots.tasks": "ENTERING LEAVING Task TaskBatch TaskKind",
        "hal_core.streams": "Event Stream",
        "hal_core.tickets": "DONE Ticket",
    },
)
