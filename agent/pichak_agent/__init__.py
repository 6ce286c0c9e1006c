"""The agent: one on each node; measures in child processes and loses no result."""
