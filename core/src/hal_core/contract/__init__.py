"""What a device promises: hooks, primitives, capabilities, counters."""
