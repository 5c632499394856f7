"""What Hypothesis draws: requests, batches, values, views."""
