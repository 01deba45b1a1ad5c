"""Where episodes happen: tasks, environments that answer a policy, the runner of many at once."""
