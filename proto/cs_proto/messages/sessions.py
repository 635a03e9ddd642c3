"""How workers and clients meet the server, and agree on a mailbox with it. Codes 10-19."""

from __future__ import annotations

from typing import Literal

from cs_proto.records import Count, Record, record

from .shared import Pid, Replicas, Worker


@record(10)
class Register(Record):
    """Worker to server, first message: who I am and where I listen."""

    protocol: Count
    worker: Worker


@record(11)
class Registered(Record):
    """Server to every worker, once all have registered: you may take runs. ``workers`` in replica order."""

    replicas: Replicas
    parameter_device: str
    workers: tuple[Worker, ...]


@record(12)
class Hello(Record):
    """Client to server, first message. One controller at a time; observers may only read."""

    protocol: Count
    role: Literal["controller", "observer"]
    client: str
    pid: Pid


@record(13)
class Welcome(Record):
    """Server to client, once all workers have registered."""

    replicas: Replicas
    parameter_device: str
    server_pid: Pid
    workers: tuple[Worker, ...]


@record(14)
class Goodbye(Record):
    """Client to server: forget me. Not answered."""

    client: str


@record(15)
class Offer(Record):
    """Who connects to who listens, before the mailbox is used: what you get from me and is not in ``mailbox`` counts
    from here on, and I post what fits there once you have opened it."""

    mailbox: Count


@record(16)
class MailboxAccepted(Record):
    """Answer to :class:`Offer`, over ZeroMQ: I have opened the mailbox and post what fits there from here on; or why
    not (``refused``), and everything goes over ZeroMQ as before."""

    mailbox: Count
    refused: str
