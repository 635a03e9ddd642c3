"""What every process needs and what may use the operating system: mappings, mailboxes, sockets, the supervisor link."""
