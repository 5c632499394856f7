"""What checks act with: a state or bare memory beside its model, batches, steps, roads to a hook."""
