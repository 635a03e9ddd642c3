"""CURVE: sockets over TCP that encrypt, and know their peer by its key. The keys lie in files of one directory.

ZeroMQ's guide explains CURVE (https://rfc.zeromq.org/spec/26). Every key is a pair: the public key lies in
``NAME.key``, which others may read, and both lie in ``NAME.key_secret``, which only its owner may read. The format is
that of ``zmq.auth``. The name says the role: ``service``, ``observer`` and ``observer-*`` for those that may read, and
``worker-*`` for the workers of another machine. How many workers that machine may run is a line ``places = 8`` in the
metadata of ``worker-*.key``; without it, one.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import stat
from typing import Any, ClassVar, Self

import zmq
import zmq.auth
from zmq.utils import z85

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen
from cs_proto.messages import MOST_REPLICAS
from cs_runtime.ancestors import why_replaceable

__all__ = [
    "WORKER_ROLES",
    "ObserverKeys",
    "PeerKeys",
    "ServiceKeys",
    "WorkerKeys",
    "ZapHandler",
    "check_endpoint",
    "is_every_network",
    "key_pair",
    "make_keys",
    "make_service_keys",
    "protect_client",
    "protect_server",
    "read_public",
    "write_public",
]

_log = logging.getLogger("central_storage.curve")

# Of the questions that ZeroMQ asks about the keys of peers.
_DOMAIN = b"central-storage"
_ZAP_ENDPOINT, _ZAP_VERSION, _CURVE = "inproc://zeromq.zap.01", b"1.0", b"CURVE"
_SERVICE, _OBSERVER, _WORKER = "service", "observer", "worker"
_PUBLIC, _SECRET = ".key", ".key_secret"
#: How the role of a worker begins.
WORKER_ROLES = f"{_WORKER}-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PLACES = re.compile(r"^ +places = ([1-9][0-9]{0,3})$", re.MULTILINE)
_KEY_NBYTES = 32
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[\w:.%]+\]|[A-Za-z0-9*][\w.*-]*):(?P<port>[0-9]{1,5})", re.ASCII)


@frozen
class ServiceKeys:
    """The keys of a service, and where those of its peers lie."""

    directory: str
    public: bytes
    secret: bytes

    @classmethod
    def read(cls, directory: str) -> Self:
        """The keys that :func:`make_keys` has made.

        Raises ConfigurationError if a file is missing, is no key, if others could read or replace the secret one, if
        they could write the key of a peer and so admit themselves, if a file for a public key holds a secret one, or if
        ``service.key``, where it is there, is not the public key of the secret one: peers that have it would wait
        without end.
        """
        directory = _own_directory(directory)
        keys = cls(directory, *_pair(os.path.join(directory, _SERVICE + _SECRET)))
        _check_service(directory, keys.public)
        for role in _known(directory):
            if not _is_named(role):
                raise ConfigurationError(
                    f"the key {keys._path(role)!a} has a name that no peer has: 1 to 64 of the characters A-Z a-z 0-9 "
                    ". _ -; rename or remove it"
                )
            read_public(keys._path(role))
        return keys

    def role_of(self, key: bytes) -> str:
        """Which peer has this public key (40 characters of Z85), such as ``observer-ann`` or ``worker-n1``; "" if it is
        nobody's. A key that an observer and a worker have is the observer's. The directory is read anew, so a key that
        is removed admits nobody from then on, nor does one that others may write."""
        try:
            known = _known(_own_directory(self.directory))
        except (ConfigurationError, OSError) as error:
            _log.warning("nobody is admitted: %s", error)
            return ""
        named = filter(_is_named, known)
        return next((role for role in named if key == _public_or_none(self._path(role))), "")

    def places_of(self, role: str) -> int:
        """How many workers the machine with the key of this role may run: 1 if its file does not say it."""
        try:
            with open(self._path(role), encoding="utf-8", errors="replace") as file:
                found = _PLACES.search(file.read())
        except OSError:
            return 1
        return int(found[1]) if found else 1

    def _path(self, role: str) -> str:
        return os.path.join(self.directory, role + _PUBLIC)


@frozen
class PeerKeys:
    """The key pair of a peer on another machine, and the public key of the service that it believes."""

    path: str
    public: bytes
    secret: bytes
    service: bytes

    #: What the peer is, and which files of a directory have keys of such peers.
    kind: ClassVar[str]
    files: ClassVar[str]
    #: What its directory is for.
    use: ClassVar[str]

    @classmethod
    def read(cls, directory: str) -> Self:
        """The keys in ``directory``: ``service.key``, and one secret key of such a peer.

        Raises ConfigurationError if one is missing, if there are several peers, if others could read or replace the
        secret one, or if the directory has the service's secret key, too, and it does not belong to ``service.key``.
        """
        directory = _own_directory(directory)
        names = sorted(os.listdir(directory))
        secrets = [name for name in names if name.endswith(_SECRET) and _is_of(cls.kind, name.removesuffix(_SECRET))]
        if len(secrets) != 1:
            has = (
                f"the secret keys of several {cls.kind}s ({', '.join(secrets)})"
                if secrets
                else f"no {cls.kind}'s secret key"
            )
            raise ConfigurationError(
                f"{directory} has {has}: a directory for {cls.use} has service.key and one {cls.files}, which "
                "cs-launch keys makes"
            )
        path = os.path.join(directory, secrets[0])
        service = read_public(os.path.join(directory, _SERVICE + _PUBLIC))
        if _SERVICE + _SECRET in names:
            _check_service(directory, _pair(os.path.join(directory, _SERVICE + _SECRET))[0])
        return cls(path, *_pair(path), service)

    @property
    def role(self) -> str:
        """What the service calls the peer, such as ``observer-ann``, if its files have the names that they were made
        with."""
        return os.path.basename(self.path).removesuffix(_SECRET)


@frozen
class ObserverKeys(PeerKeys):
    """The keys of an observer."""

    kind = _OBSERVER
    files = "observer*.key_secret"
    use = "connect"


@frozen
class WorkerKeys(PeerKeys):
    """The keys of a worker."""

    kind = _WORKER
    files = "worker-*.key_secret"
    use = "cs-launch --join"


class ZapHandler:
    """Answers the questions of a context's sockets whether a peer may connect (https://rfc.zeromq.org/spec/27). Used by
    one thread, which polls :attr:`socket`. ::

    handler = ZapHandler(context, ServiceKeys.read("keys"))  # before a socket of the context is bound
    if handler.socket.poll(1000):
        handler.answer()
    """

    def __init__(self, context: zmq.Context[Any], keys: ServiceKeys) -> None:
        """Admit the peers that ``keys`` knows."""
        self._keys = keys
        #: Readable if there is a question.
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer one question. The role of a peer that is admitted becomes the ``User-Id`` of its messages."""
        version, request, domain, address, _, mechanism, *credentials = self.socket.recv_multipart()
        role = ""
        if (version, domain, mechanism) == (_ZAP_VERSION, _DOMAIN, _CURVE) and len(credentials) == 1:
            role = self._keys.role_of(z85.encode(credentials[0]))
        if not role:
            _log.info("refused a peer at %s: its key is unknown", address.decode(errors="replace"))
        status, reason = (b"200", b"OK") if role else (b"400", b"unknown key")
        self.socket.send_multipart([_ZAP_VERSION, request, status, reason, role.encode(), b""])


def make_keys(directory: str, observer: str = "", *, worker: str | None = None, places: int = 1) -> list[str]:
    """Make the keys of a service, and of an observer or a worker, in ``directory``, which is made if it does not exist.
    Keys of the service that are there stay. Returns the paths of the new files.

    Args:
        directory: A directory of this user's that is closed to others.
        observer: Tells observers apart: the files are ``observer-NAME.key`` and ``observer-NAME.key_secret``.
        worker: Make keys for the workers of another machine, not for an observer: the files are ``worker-NAME.key``
            and ``worker-NAME.key_secret``.
        places: How many workers that machine may run.

    Raises:
        ConfigurationError: The directory is open to others, the name is no name, the peer has a key already, or no
            machine runs so many workers.
    """
    if not 1 <= places <= MOST_REPLICAS:
        raise ConfigurationError(f"a machine runs 1 to {MOST_REPLICAS} workers, not {places}")
    kind, given = (_OBSERVER, observer) if worker is None else (_WORKER, worker)
    if (given or worker is not None) and not _NAME.fullmatch(given):
        raise ConfigurationError(
            f"{given!r:.80} is no name for {'an observer' if worker is None else 'a worker'}: 1 to 64 of the "
            "characters A-Z a-z 0-9 . _ -"
        )
    name = f"{kind}-{given}" if given else kind
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        directory = _own_directory(directory)
        there = set(os.listdir(directory))
        if {name + _PUBLIC, name + _SECRET} & there:
            raise ConfigurationError(
                f"{os.path.join(directory, name + _PUBLIC)} is there already: remove it and {name + _SECRET} to make a "
                f"new pair, or name another {kind} (--{kind} NAME)"
            )
        wanted = [name] if _SERVICE + _SECRET in there else [_SERVICE, name]
        return [path for each in wanted for path in _make(directory, each, places if each == name else 1)]
    except OSError as error:
        raise ConfigurationError(f"no keys can be made in {directory}: {error.strerror}") from error


def make_service_keys(directory: str) -> ServiceKeys:
    """The new keys of a service in its own directory, where they replace those of an earlier one. Raises
    ConfigurationError if they cannot be written."""
    try:
        _make(_own_directory(directory), _SERVICE)
    except OSError as error:
        raise ConfigurationError(f"no keys can be made in {directory}: {error.strerror}") from error
    return ServiceKeys.read(directory)


def key_pair() -> tuple[bytes, bytes]:
    """A new public and secret key, in memory only."""
    return zmq.curve_keypair()


def write_public(directory: str, role: str, key: bytes, places: int = 1) -> None:
    """Let the peer with this public key have a role, such as ``worker-n1``, and nobody who had it before. The machine
    of a worker may run ``places`` of them.

    Raises ConfigurationError for what is no key, and OSError if it cannot be written.
    """
    try:
        if len(key) != 40 or len(z85.decode(key)) != _KEY_NBYTES:
            raise ValueError("a key has 40 characters")
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{key!r:.80} is no public key: {error}") from error
    draft = os.path.join(directory, f"{role}.draft")
    with open(draft, "w") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(f'{_metadata(places)}curve\n    public-key = "{key.decode()}"\n')
    os.replace(draft, os.path.join(directory, role + _PUBLIC))


def protect_server(socket: zmq.Socket[Any], keys: ServiceKeys) -> None:
    """Let ``socket`` encrypt, and admit only what the :class:`ZapHandler` of its context admits. Call it before
    ``bind``."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def protect_client(socket: zmq.Socket[Any], keys: PeerKeys) -> None:
    """Let ``socket`` encrypt, and talk only to the service whose key is known. Call it before ``connect``."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service)


def check_endpoint(endpoint: str, what: str) -> tuple[str, int]:
    """The host and the port of ``tcp://HOST:PORT``, where an IPv6 address stands in brackets. ``what`` names the option
    in an error. Raises ConfigurationError, also for an address that means every network, or many machines."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"]) > 65535:
        raise ConfigurationError(
            f"{what} must be tcp://ADDRESS:PORT, such as tcp://192.0.2.7:5600, not {endpoint!r:.200}"
        )
    host = found["host"].strip("[]")
    if is_every_network(host):
        raise ConfigurationError(
            f"{what} {endpoint} would mean every network of this machine: name the one address that others use"
        )
    if _is_of_many(host):
        raise ConfigurationError(f"{what} {endpoint} is a broadcast or multicast address: name that of one machine")
    return host, int(found["port"])


def is_every_network(host: str) -> bool:
    """Whether an address means all networks of a machine, however it is written. A name is none: nobody is asked.

    >>> [is_every_network(host) for host in ("0.0.0.0", "0", "0x0", "::", "::ffff:0.0.0.0", "*", "127.0.0.1", "host")]
    [True, True, True, True, True, True, False, False]
    """
    return host == "*" or any(address.is_unspecified for address in _numeric(host))


def _is_of_many(host: str) -> bool:
    """Whether an address is that of many machines, where a socket can listen, but nobody reach it."""
    return any(address.is_multicast or str(address) == "255.255.255.255" for address in _numeric(host))


def _numeric(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The address that ``host`` is, however it is written; none if it is a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return []
    addresses = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _make(directory: str, name: str, places: int = 1) -> list[str]:
    before = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(directory, name)
    finally:
        os.umask(before)
    if places > 1:  # the library writes metadata to the secret file alone
        with open(public, encoding="utf-8") as file:
            text = file.read()
        with open(public, "w", encoding="utf-8") as file:
            file.write(text.replace("metadata\n", _metadata(places), 1))
    os.chmod(public, 0o644)
    return [public, secret]


def _metadata(places: int) -> str:
    """The first section of the file of a public key."""
    return "metadata\n" + (f"    places = {places}\n" if places > 1 else "")


def _is_of(kind: str, name: str) -> bool:
    """Whether the files of this name, without what follows it, are those of an observer or of a worker."""
    return name == kind == _OBSERVER or name.startswith(f"{kind}-")


def _is_named(role: str) -> bool:
    """Whether a role is one that :func:`make_keys` could have given."""
    return _NAME.fullmatch(role.partition("-")[2] or role) is not None


def _own_directory(directory: str) -> str:
    """The absolute path. Raises ConfigurationError unless it is a directory that only this user can change."""
    directory = os.path.abspath(directory)
    try:
        status = os.stat(directory)
    except OSError as error:
        raise ConfigurationError(
            f"{directory}, the directory of keys, cannot be read ({error.strerror}); cs-launch keys DIR makes one"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{directory} is no directory of keys; cs-launch keys DIR makes one")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigurationError(
            f"{directory}, the directory of keys, must belong to you, and others may not write there"
        )
    if objection := why_replaceable(os.path.realpath(directory)):
        raise ConfigurationError(f"other users could replace {directory}, the directory of keys: {objection}")
    return directory


def _pair(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key of a file that is closed to others."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise ConfigurationError(
            f"the key {path} cannot be read: {error.strerror}; cs-launch keys DIR makes it"
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"the key {path} must be a file of yours that is closed to other users (chmod 600)")
    public, secret = _loaded(path)
    if secret is None:
        raise ConfigurationError(f"{path} holds no secret key")
    if zmq.curve_public(secret) != public:
        raise ConfigurationError(
            f"the public key in {path} does not belong to the secret key there; remove the pair, let cs-launch keys "
            "make a new one, and copy it to the other machines"
        )
    return public, secret


def _check_service(directory: str, public: bytes) -> None:
    """Raise ConfigurationError if ``service.key`` is there and is not the public key of the service there."""
    path = os.path.join(directory, _SERVICE + _PUBLIC)
    if os.path.lexists(path) and read_public(path) != public:
        raise ConfigurationError(
            f"the key {path} does not belong to {path}{_SECRET.removeprefix(_PUBLIC)}, so peers that have it cannot "
            "reach the service; copy both files anew from the directory that cs-launch keys has made, or remove both, "
            "run cs-launch keys there, and copy service.key to the other machines"
        )


def read_public(path: str) -> bytes:
    """The public key in a file. Raises ConfigurationError if there is none, if others may write it, or if it also holds
    the secret key, which others may read there."""
    _check_public(path)
    public, secret = _loaded(path)
    if secret is not None:
        raise ConfigurationError(
            f"the key {path} holds a secret key, and others may read such a file; put the public key alone there, and "
            "make a new pair if somebody has read this one"
        )
    return public


def _known(directory: str) -> list[str]:
    """The roles of all peers with a key in ``directory``. Raises OSError."""
    roles = [name.removesuffix(_PUBLIC) for name in sorted(os.listdir(directory)) if name.endswith(_PUBLIC)]
    return [role for role in roles if _is_of(_OBSERVER, role) or _is_of(_WORKER, role)]


def _check_public(path: str) -> None:
    """Raise ConfigurationError if others may write the file of a public key, and so say whom it stands for."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise ConfigurationError(f"the key {path} cannot be read: {error.strerror}") from error
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid in (0, os.geteuid())
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigurationError(f"the key {path} must be a file of yours that others may not write (chmod 644)")


def _public_or_none(path: str) -> bytes | None:
    try:
        return read_public(path)
    except ConfigurationError as error:
        _log.info("%s", error)
        return None


def _loaded(path: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and len(z85.decode(key)) != _KEY_NBYTES:
                raise ValueError("a key has 40 characters")
    except OSError as error:
        raise ConfigurationError(f"the key {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library lets out whatever its parser meets
        raise ConfigurationError(f"{path} holds no key: {error}") from error
    return public, secret
