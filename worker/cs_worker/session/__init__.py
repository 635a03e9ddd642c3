"""The session of a worker: what it hears, what it sends, and when it waits."""
