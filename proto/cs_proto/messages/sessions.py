"""How workers and clients meet the server, and agree on a mailbox with it. Codes 10-19."""

from __future__ import annotations

from typing import Literal

from cs_proto.records import Count, Record, record

from .shared import Pid, Replicas, Worker


@record(10)
class Register(Record):
    """Worker to server, first message: which worker it is. It must be the one that the supervisor has introduced."""

    protocol: Count
    worker: Worker


@record(11)
class Registered(Record):
    """Server to every worker, once all have registered: runs may begin. ``workers`` is in replica order."""

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
    """Server to client, once all workers have registered.

    ``last_run`` is the last run of an earlier controller that the server knows. A controller counts on from there: no
    two runs of which the server speaks have one number, whoever's they are.
    """

    replicas: Replicas
    parameter_device: str
    server_pid: Pid
    workers: tuple[Worker, ...]
    last_run: Count = 0


@record(14)
class Goodbye(Record):
    """Client to server: the session ends. Not answered."""

    client: str


@record(15)
class Offer(Record):
    """The connecting peer offers ``mailbox`` to the listening peer, over ZeroMQ. From this message on, the sender
    counts its messages over ZeroMQ. It posts to the mailbox once the other peer has accepted it."""

    mailbox: Count


@record(16)
class MailboxAccepted(Record):
    """Answer to :class:`Offer`, over ZeroMQ: the mailbox is open, and from now on the sender posts messages there
    that fit. If it cannot be opened, ``refused`` says why, and all messages still go over ZeroMQ."""

    mailbox: Count
    refused: str
