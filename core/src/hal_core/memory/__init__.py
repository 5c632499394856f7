"""Device memory: views of it, dtypes, values on their way into it, write plans, copies out of it."""
