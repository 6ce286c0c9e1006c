"""The coordinator: finds nodes, dispatches jobs, keeps history, compares and picks."""
