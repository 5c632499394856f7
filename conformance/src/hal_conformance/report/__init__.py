"""The kit's report and command."""
