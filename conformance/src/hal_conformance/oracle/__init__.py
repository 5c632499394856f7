"""What must be: models in plain Python and NumPy that share no code with devices."""
