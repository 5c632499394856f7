"""Several ranks: an engine that outlives them, what it says to them, and what each of them does."""
