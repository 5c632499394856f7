"""What a step tells the engine: records, the ticket that makes one, and the sinks that take them."""
