"""The contract of a device: hooks, primitives, capabilities, counters."""
