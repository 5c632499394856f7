"""Several ranks: their engine, which outlives them, its messages to them, and the work of a rank."""
