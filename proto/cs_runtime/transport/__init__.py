"""Records from one process to another: the channel of a role, its mailboxes and sockets, the supervisor link."""
