"""The slot table and what is in it: fields, layout, admission, tasks, insertion, the state itself, a step."""
