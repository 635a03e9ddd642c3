"""The runtime of every process, which may use the operating system: mappings, mailboxes, sockets, supervisor link."""
