"""Output of a step for the engine: records, the ticket that builds one, and the sinks that take them."""
