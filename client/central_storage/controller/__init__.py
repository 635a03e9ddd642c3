"""The script's side of the conversation with a service: runs, operations, results."""
