"""An opened device with its hooks bound, each behind the policy."""
