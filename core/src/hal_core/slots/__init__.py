"""The slot table and its users: fields, layout, admission, tasks, insertion, the state itself, a step."""
