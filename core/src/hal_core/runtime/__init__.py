"""An opened device with its hooks bound, each called through the policy."""
