"""Models of the expected results in plain Python and NumPy that share no code with devices."""
