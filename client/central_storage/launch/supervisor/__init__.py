"""The supervisor: it starts, connects and watches the processes of a service."""
