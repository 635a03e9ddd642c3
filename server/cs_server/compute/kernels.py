"""Applies update rules to ranges of a slab: by compiled kernels where there are any, elsewhere by the NumPy reference.

Owns the choice between the two, the check of everything that reaches compiled code, and the directory in which compiled
code is kept between processes. It knows no variables, messages or commits: the engine's shell hands it arrays. numba is
imported where something has to be compiled. What is kept is machine code behind its hash: nothing is unpickled.

Updates of ranges that do not overlap may run in several threads at once: a kernel holds no lock, and not the GIL.
"""

import hashlib
import logging
import math
import os
import platform
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import llvmlite.binding as llvm
import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen
from cs_runtime.private_files import read_file
from cs_server.rules import MEAN_LANES, RULES, Array, Rule, reference, scalars

from . import object_loader, programs
from .undo import Lane

KERNEL_DTYPES = ("float32", "float64")
"""Dtypes that have compiled kernels; the reference serves the others."""

ALWAYS = (("sgd", "float32"), ("adam", "float32"))
"""Step and dtype of the kernels that are compiled, where they are not kept, before anything is served. All together
would take more than a minute the first time on a machine; each is about a second for the update that needs it first,
and so is that of the rule's sparse gradients."""

CHUNK_NBYTES = 256 * 1024 - 192
"""What the reference does at a time of each array: the sum of the gradients is still in the cache when the rule reads
it."""

BLOCK_NBYTES = 4096
"""What compiled code does at a time of each array."""

KEPT_BLOCK_NBYTES = 1024
"""The same where it keeps what it overwrites: the copy never leaves the innermost cache, and the next block is on its
way from memory while this one is computed. Four times as much costs a third of the update (`benchmarks/undo.py`)."""

KEPT_SHARE_NBYTES = 1 << 20
"""How much memory to find rows in a lane may keep for the next update of a table. More is needed for more than 20000
rows; to get it anew takes about an eighth of what the shortest update of those takes, and less of a longer one."""

_KEEPS_NOTHING = Lane()
# The address and the length of an array in memory.
_Span: TypeAlias = tuple[int, int]
_logger = logging.getLogger("cs_server.kernels")


def apply_dense(
    rule: Rule,
    ranges: Array,
    parameters: Array,
    slots: tuple[Array, ...],
    gradients: tuple[Array, ...],
    hyperparameters: Hyperparameters,
    t: int,
    scale: Sequence[float] = (),
) -> None:
    """Sum the replicas' gradients in replica order and apply the rule's t-th update, in place and in one pass.

    `ranges` is int64 of shape [n, 2]: the elements from start to stop of every range, ascending and disjoint, are
    updated and no other element is touched. Parameters, slots (in the rule's order) and gradients (one for each
    replica) are 1-D, contiguous, of one dtype and one length; gradients may be read-only, and two replicas may share
    one. `scale` has the weight of each gradient and at last the factor of their sum; empty, all are 1. The result has
    the bits of `rules.reference`.

    Raises InvalidArgumentError before anything is changed, when something of this does not hold.
    """
    numbers = UpdateNumbers(rule, parameters.dtype, len(gradients))
    factors = Factors(np.array(scale[-1:], np.float64), np.zeros(len(ranges), np.int64)) if scale else None
    update = BoundRanges(numbers, ranges, parameters, slots, gradients, factors=factors).update(bool(scale))
    numbers.set(hyperparameters, t)
    numbers.bound(scale[:-1])
    update()


class Factors(NamedTuple):
    """Of some ranges by what each summed gradient is multiplied: ``values[which[r]]``, for range r. The values are
    float64, and read when an update is made; ``which`` is int64 [ranges]."""

    values: Array
    which: Array


class UpdateNumbers:
    """What changes from one update of some ranges to the next: the rule's numbers, the weights and the bound of each
    element. Every share of the update reads the same ones."""

    def __init__(self, rule: Rule, dtype: np.dtype[Any], replicas: int) -> None:
        """Raises InvalidArgumentError for a rule that is not of the table."""
        if RULES.get(rule.name) is not rule:
            raise InvalidArgumentError(f"{rule.name!r} is not a rule of the table: there are {', '.join(RULES)}")
        self.rule = rule
        self.numbers, self.scale = np.zeros(rule.count_of_numbers, dtype), np.ones(replicas + 1, dtype)
        self.given: tuple[Hyperparameters, int] = ({}, 1)  # for the reference

        self.weights: Sequence[float] = ()

    def set(self, hyperparameters: Hyperparameters, t: int) -> None:
        """Let the next update be the rule's t-th."""
        self.given = hyperparameters, t
        self.numbers[:] = scalars(self.rule, hyperparameters, t, self.numbers.dtype)

    def bound(self, weights: Sequence[float], limit: float = math.inf) -> None:
        """Let the next update that is scaled have these weights of the gradients; none: all are 1. ``limit`` bounds
        each element of their sum, where there is a kernel."""
        self.weights = weights
        with np.errstate(over="ignore"):  # a weight may be infinite in half precision, in which no kernel computes
            self.scale[:-1] = weights or 1.0
            self.scale[-1] = limit


class BoundRanges:
    """What `apply_dense` does with these arrays, which are checked once, and not when an update is made."""

    def __init__(
        self,
        numbers: UpdateNumbers,
        ranges: Array,
        parameters: Array,
        slots: tuple[Array, ...],
        gradients: tuple[Array, ...],
        lane: Lane = _KEEPS_NOTHING,
        before: int = 0,
        factors: Factors | None = None,
    ) -> None:
        """Updates read ``numbers`` and ``factors``; no factors: all are 1. ``before`` counts the pieces of the phase
        that the lane has to do earlier."""
        rule = numbers.rule
        self._rule, self._written, self._gradients, self._lane = rule, (parameters, *slots), gradients, lane
        self._ranges, self._numbers, dtype = ranges, numbers, parameters.dtype
        self._addresses = _checked(rule, ranges, parameters, slots, gradients)
        self._kernel = _kernel(rule, dtype)
        self._before = np.array([before])
        self._factors = factors or Factors(np.ones(1), np.zeros(len(ranges), np.int64))
        self._chunks: list[tuple[int, slice]] = []
        if self._kernel is None:
            self._chunks = list(_chunks(ranges, CHUNK_NBYTES // parameters.itemsize))
            #: The number of pieces that the lane goes through.
            self.pieces = len(self._chunks)
        else:
            block = _block_nbytes(lane) // dtype.itemsize
            self.pieces = int((-((ranges[:, 0] - ranges[:, 1]) // block)).sum())

    def update(self, is_scaled: bool) -> Callable[[], None]:
        """What makes the update, as often as it is called, while the caller holds the gradients, of which it has only
        the addresses. ``is_scaled``: there are weights, bounds or factors."""
        if self._kernel is None:
            return partial(self._apply_reference, is_scaled)
        scale, factors = self._numbers.scale if is_scaled else self._numbers.scale[:0], self._factors
        arrays = (self._ranges, self._addresses, scale, self._before, factors.values, factors.which)
        return _bound(self._kernel, self._numbers.numbers, self._written, self._lane, *arrays)

    def _apply_reference(self, is_scaled: bool) -> None:
        parameters, *slots = self._written
        (hyperparameters, t), weights = self._numbers.given, self._numbers.weights
        values, which = self._factors.values, self._factors.which
        for of, part in self._lane.rest(self._chunks, int(self._before[0])):
            self._lane.keep([(array, part) for array in self._written])
            gradients = [gradient[part] for gradient in self._gradients]
            own = tuple(slot[part] for slot in slots)
            scale = (*(weights or [1.0] * len(gradients)), float(values[which[of]])) if is_scaled else ()
            if not reference(self._rule, parameters[part], gradients, own, hyperparameters, t, scale):
                self._lane.alarm[0] = 1


def in_turn(updates: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """What makes these updates one after the other. If all are compiled, one call makes them, so that a thread does not
    wait for the GIL between two of them."""
    if len(updates) == 1:
        return updates[0]
    bound = [update for update in updates if isinstance(update, object_loader.Bound)]
    if len(bound) == len(updates):
        return object_loader.in_turn(bound)

    def run() -> None:
        for update in updates:
            update()

    return run


def has_kernel(rule: Rule, dtype: np.dtype[Any], *, is_sparse: bool) -> bool:
    """Whether compiled code applies this rule to ranges of this dtype, or to rows, so that there may be `BoundRows`."""
    return _kernel(rule, dtype, is_sparse=is_sparse) is not None


class BoundRows:
    """Updates of the rows of a table that sparse gradients name, in place; no other row is looked at. The arrays are
    checked once, and not when an update is made."""

    def __init__(self, rule: Rule, parameters: Array, slots: tuple[Array, ...]) -> None:
        """Parameters and slots are 2-D, contiguous, of one dtype and shape [height, width]. Raises
        InvalidArgumentError when something of this does not hold."""
        kernel = _kernel(rule, parameters.dtype, is_sparse=True)
        if kernel is None:
            raise InvalidArgumentError(f"{rule.name} is not compiled for {parameters.dtype}")
        self._rule, self._kernel, self._shape = rule, kernel, parameters.shape
        self._written = (parameters.reshape(-1), *(slot.reshape(-1) for slot in slots))
        self._spans = _written(rule, self._written[0], self._written[1:], len(parameters))
        self._shares: dict[int, RowsShare] = {}
        self._gradients: Sequence[tuple[Array, Array]] = ()
        #: Of each replica where the values and the indices of the next update begin, and how many rows there are.
        self.where = np.zeros((3, 0), np.int64)

    def take(self, gradients: Sequence[tuple[Array, Array]]) -> None:
        """What the next update is made of: of each replica (values [k, width], int64 indices [k]), both contiguous.
        Equal rows are added in this order; an index outside [0, height) is left out.

        Raises InvalidArgumentError when something of this does not hold.
        """
        width, parameters, read = self._shape[1], self._written[0], []
        for values, indices in gradients:
            if indices.ndim != 1 or values.shape != (len(indices), width):
                raise InvalidArgumentError(
                    f"values {values.shape} of rows {indices.shape} do not fit a width of {width}"
                )
            if values.dtype != parameters.dtype or indices.dtype != np.int64:
                raise InvalidArgumentError(
                    f"values {values.dtype} of rows {indices.dtype} must be {parameters.dtype} and int64"
                )
            if not all(array.flags.c_contiguous and array.flags.aligned for array in (values, indices)):
                raise InvalidArgumentError("values and rows must be contiguous and aligned")
            value, index = (array.__array_interface__["data"][0] for array in (values, indices))
            _check_apart(self._spans, [(value, values.nbytes)])
            read.append((value, index, len(indices)))
        if not read:
            raise InvalidArgumentError(f"{self._rule.name} needs the gradient of at least one replica")
        self.where, self._gradients = np.array(read, np.int64).T.copy(), gradients

    def apply(self, share: int, shares: int, lane: Lane, hyperparameters: Hyperparameters, t: int) -> None:
        """Do one of the ``shares`` of the rule's t-th update, from 0: each row falls to one of them, and several
        threads may do them at once."""
        total = int(self.where[2].sum())
        known = self._shares.pop(share, None)
        if known is None or not known.fits(lane, len(self._gradients), total):
            known = self.share(lane, len(self._gradients), total)
        known.where[:] = self.where
        self.set(known, share, shares, hyperparameters, t)
        known.update()
        if known.nbytes <= KEPT_SHARE_NBYTES:
            self._shares[share] = known

    def share(self, lane: Lane, replicas: int, room: int) -> "RowsShare":
        """What a lane needs for a share of updates in which the replicas name up to ``room`` rows together."""
        made, dtype = RowsShare(lane, replicas, room), self._written[0].dtype
        partial = () if self._rule.row is None else (np.empty(MEAN_LANES, dtype),)
        made.numbers = np.zeros(self._rule.count_of_numbers, dtype)
        made.update = _bound(self._kernel, made.numbers, self._written, lane, *made.arrays, *partial)
        return made

    def set(self, share: "RowsShare", which: int, shares: int, hyperparameters: Hyperparameters, t: int) -> None:
        """Let the next update of a share be that of this number in the rule's t-th update."""
        share.place[:] = which, shares, *self._shape
        share.numbers[:] = scalars(self._rule, hyperparameters, t, self._written[0].dtype)


class RowsShare:
    """The memory that a lane needs to find the rows of its share, and its kernel over that."""

    #: Of each replica where the values and the indices begin, and how many rows there are: int64 [3, replicas].
    where: Array
    numbers: Array
    update: object_loader.Bound

    def __init__(self, lane: Lane, replicas: int, room: int) -> None:
        self._lane, self._room = lane, room
        self.where, self.place = np.empty((3, replicas), np.int64), np.empty(4, np.int64)
        table = np.empty(1 << max(4, (2 * room - 1).bit_length()), np.int32)
        memory = table, np.empty((room, 3), np.int64), np.empty((room + 1, 2), np.int64)
        self.arrays = (*self.where, self.place, *memory)
        self.nbytes = sum(array.nbytes for array in memory)

    def fits(self, lane: Lane, replicas: int, total: int) -> bool:
        return self._lane is lane and self.where.shape[1] == replicas and total <= self._room <= 16 * total


def _bound(
    kernel: object_loader.Bind, numbers: Array, written: tuple[Array, ...], lane: Lane, *arrays: Array
) -> object_loader.Bound:
    """The kernel over arrays as `jit` describes them. ``numbers`` are those of the rule."""
    scratch = np.full(2 * (_block_nbytes(lane) // numbers.itemsize), -0.0, numbers.dtype)
    return kernel(numbers, lane.progress, lane.area(numbers.dtype), scratch, lane.alarm, *arrays, *written)


def _block_nbytes(lane: Lane) -> int:
    return KEPT_BLOCK_NBYTES if lane.progress.size else BLOCK_NBYTES


def _chunks(ranges: Array, chunk: int) -> Iterator[tuple[int, slice]]:
    """The pieces of an update, in order, each with the number of its range."""
    for number, (start, stop) in enumerate(ranges.tolist()):
        for first in range(start, stop, chunk):
            yield number, slice(first, min(first + chunk, stop))


def merge_kernel(dtype: np.dtype[Any]) -> Callable[..., int] | None:
    """The loop of `rows.merge` for this dtype; None where NumPy has to do it."""
    key = (_MERGE, dtype)
    if key not in _kernels and dtype.name in KERNEL_DTYPES:
        _prepare(None, dtype, cache_directory())
    bind = _kernels.get(key)
    return None if bind is None else partial(_merge, bind)


@frozen
class Loaded:
    """How long `load` took, how many kernels it had to compile and where the code is kept (None: nowhere)."""

    seconds: float
    compiled: int
    directory: Path | None


def load(
    run_directory: Path | None = None, share: tuple[int, int] | None = None, *, is_awaited: bool = False
) -> Loaded:
    """Make the kernels of ``ALWAYS`` ready, which are compiled where the cache directory does not hold them: no update
    with any of them compiles, opens or imports anything afterwards.

    Another one is read from there, or compiled and kept there for the next process, by the first update that needs it.
    ``share`` (k, n) compiles the k-th of n shares of all now, so that n processes, k from 0, make everything ready that
    updates may need. ``is_awaited``: a user waits, and is told once if something is compiled.
    """
    begin = time.perf_counter()
    directory = cache_directory(run_directory)
    compiled = 0
    rules = {rule.kernel: rule for rule in RULES.values() if rule.is_compiled}.values()
    by_elements = [(rule, False) for rule in rules if rule.row is None]
    kernels = [(None, False), *by_elements, *((rule, True) for rule in rules)]
    for number, (name, (rule, is_sparse)) in enumerate(product(KERNEL_DTYPES, kernels)):
        dtype, key = np.dtype(name), (_name(rule, is_sparse), name)
        is_asked = key in ALWAYS or (share is not None and number % share[1] == share[0])
        if is_asked:
            said = "the kernels that every service has" if is_awaited and not compiled else ""
            compiled += _prepare(rule, dtype, directory, said, is_sparse=is_sparse)
    object_loader.chain()
    programs.compiled()
    return Loaded(time.perf_counter() - begin, compiled, directory)


def cache_directory(run_directory: Path | None = None) -> Path | None:
    """The private directory for compiled code: in the user's cache, else in the run directory, else None.

    Loading compiled code is running code, so the directory and the one around it must belong to this user and nobody
    else may write there. Its name changes with everything the code depends on. Raises OSError for a run directory that
    is not private either.
    """
    name = f"kernels-{_fingerprint()}"
    try:
        return _private(_private(_user_cache()) / name)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        _logger.warning("compiled kernels are kept in %s only: %s", run_directory or "this process", error)
    if run_directory is None:
        return None
    return _private(_private(run_directory) / name)


# The check. What passes it may be handed to compiled code, to which a wrong address is a crash.


def _checked(
    rule: Rule, ranges: Array, parameters: Array, slots: tuple[Array, ...], gradients: tuple[Array, ...]
) -> Array:
    """The gradients' base addresses."""
    if rule.row is not None:
        raise InvalidArgumentError(f"{rule.name} updates rows, not ranges of elements")
    written = _written(rule, parameters, slots, 0)
    if not gradients:
        raise InvalidArgumentError(f"{rule.name} needs the gradient of at least one replica")
    read = [_address(f"gradient of replica {r}", g, parameters, False) for r, g in enumerate(gradients)]
    _check_apart(written, [(each, parameters.nbytes) for each in read])
    _check_ranges(ranges, parameters.shape[0])
    return np.array(read, np.int64)


def _written(rule: Rule, parameters: Array, slots: tuple[Array, ...], height: int) -> list[_Span]:
    """Where parameters and slots lie. ``height`` is the number of rows of the parameters."""
    if len(slots) != len(rule.slots):
        raise InvalidArgumentError(f"{rule.name} has the slots {rule.slots}, {len(slots)} arrays were given for them")
    like = parameters if rule.row is None else parameters[:height]
    addresses = [_address("parameters", parameters, parameters, True)]
    addresses += [_address(name, slot, like, True) for name, slot in zip(rule.slots, slots, strict=True)]
    return [(address, array.nbytes) for address, array in zip(addresses, (parameters, *slots), strict=True)]


def _address(what: str, array: Array, like: Array, is_written: bool) -> int:
    # Exactly ndarray: numba types a subclass (a memmap, say) in its own way, or not at all.
    if type(array) is not np.ndarray:
        raise InvalidArgumentError(f"{what}: must be a numpy.ndarray, not {type(array).__name__}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise InvalidArgumentError(f"{what}: must be 1-D and contiguous; shape {array.shape}, strides {array.strides}")
    if array.dtype != like.dtype or array.shape != like.shape:
        given, fitting = f"{array.dtype}{array.shape}", f"{like.dtype}{like.shape}"
        raise InvalidArgumentError(f"{what}: {given} does not fit the parameters, {fitting}")
    if not array.dtype.isnative or not array.flags.aligned:
        raise InvalidArgumentError(f"{what}: must be aligned and of this machine's byte order")
    if is_written and not array.flags.writeable:
        raise InvalidArgumentError(f"{what}: is read-only")
    address: int = array.__array_interface__["data"][0]
    return address


def _check_apart(written: list[_Span], read: list[_Span]) -> None:
    """What is written overlaps nothing, or an element would be updated from a value that is already new."""
    spans = sorted([(*span, True) for span in written] + [(*span, False) for span in read])
    for (address, size, is_written), (following, _, is_following_written) in pairwise(spans):
        if following - address < size and (is_written or is_following_written):
            raise InvalidArgumentError("parameters and slots must not overlap each other or a gradient in memory")


def _check_ranges(ranges: Array, length: int) -> None:
    if type(ranges) is not np.ndarray or ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 2:
        raise InvalidArgumentError("ranges: must be an int64 array of shape [n, 2]")
    if not ranges.flags.carray:
        raise InvalidArgumentError("ranges: must be contiguous, aligned and writable")
    end = 0
    for start, stop in ranges.tolist():
        if not end <= start <= stop <= length:
            raise InvalidArgumentError(f"ranges: [{start}, {stop}] does not lie ascending inside [{end}, {length}]")
        end = stop


# The kernels of this process.

_MERGE = "merge"
_ROWS = "_rows"
_kernels: dict[tuple[str, np.dtype[Any]], object_loader.Bind | None] = {}
_building = threading.Lock()
_HASH_NBYTES = hashlib.sha256().digest_size


def _kernel(rule: Rule, dtype: np.dtype[Any], *, is_sparse: bool = False) -> object_loader.Bind | None:
    key = (_name(rule, is_sparse), dtype)
    if key not in _kernels and rule.is_compiled and dtype.name in KERNEL_DTYPES:
        _prepare(rule, dtype, cache_directory(), is_sparse=is_sparse)
    return _kernels.get(key)


def _name(rule: Rule | None, is_sparse: bool) -> str:
    return _MERGE if rule is None else rule.kernel + _ROWS if is_sparse else rule.kernel


def _prepare(
    rule: Rule | None,
    dtype: np.dtype[Any],
    directory: Path | None,
    said: str | None = None,
    *,
    is_sparse: bool = False,
) -> bool:
    """Whether something had to be compiled: a kernel of a rule or, None, the sum of sparse gradients. ``said`` is what
    is then said to be compiled: by default its name, since an update waits for it; nothing if that is empty."""
    name = _name(rule, is_sparse)
    with _building:
        if (name, dtype) in _kernels:
            return False
        if os.environ.get("NUMBA_DISABLE_JIT", "0").strip() not in ("", "0"):
            _kernels[name, dtype] = None
            return False
        path = None if directory is None else _path(rule, name, dtype, directory)
        kept = None if path is None else _read(path)
        if kept is None:
            if said is None:
                said = f"{name} for {dtype}"
            if said:
                _logger.warning("compiling %s, which takes seconds, once for each user", said)
            from . import jit  # imports numba

            code = jit.build_merge(dtype) if rule is None else jit.build(rule, dtype, is_sparse=is_sparse)
            if path is not None:
                _keep(code, path)
        else:
            code = kept
        _kernels[name, dtype] = object_loader.kernel(code)
        return kept is None


def _merge(bind: object_loader.Bind, *arguments: Array) -> int:
    counts = np.array([0, arguments[-1].shape[1]])
    bind(*arguments, counts)()
    return int(counts[0])


def _path(rule: Rule | None, name: str, dtype: np.dtype[Any], directory: Path) -> Path:
    """The name changes with what the functions of the rule compute."""
    codes = [] if rule is None else [each.__code__ for each in (rule.step, rule.row) if each is not None]
    what = repr([(code.co_code, code.co_names, code.co_varnames, code.co_consts) for code in codes]).encode()
    return directory / f"{name}_{dtype.name}-{hashlib.sha256(what).hexdigest()[:16]}.code"


def _read(path: Path) -> bytes | None:
    """The code that is kept there; None where there is none, or none that is whole."""
    try:
        content = read_file(str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        _logger.warning("compiling %s anew, it cannot be read: %s", path, error)
        return None
    code = content[_HASH_NBYTES:]
    if hashlib.sha256(code).digest() != content[:_HASH_NBYTES]:
        _logger.warning("compiling %s anew, it is damaged", path)
        return None
    return code


def _keep(code: bytes, path: Path) -> None:
    """Whoever reads the file meanwhile finds all of it or nothing."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="compiling-")
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        _logger.warning("%s cannot be kept: %s", path, error)


# The cache directory.


def _user_cache() -> Path:
    if named := os.environ.get("CS_CACHE_DIR"):
        try:
            Path(named).absolute().mkdir(mode=0o700, parents=True, exist_ok=True)
            return _private(Path(named).absolute())
        except OSError as error:
            raise OSError(f"CS_CACHE_DIR={named} cannot be used: {error}") from error
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset, or to be ignored according to the XDG specification
        base = Path.home() / ".cache"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = base.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{base} belongs to another user, or others may write there")
    return base / "central-storage"


def _private(path: Path) -> Path:
    """The directory, made if missing, which belongs to this user and in which nobody else can write."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} belongs to another user, or others may write there")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{path} is not writable")
    return path


def _fingerprint() -> str:
    """Names what all compiled code depends on: the loops' sources, the compiler, the libraries and the processor."""
    digest = hashlib.sha256()
    for source in ("kernels.py", "jit.py", "object_loader.py"):
        digest.update((Path(__file__).parent / source).read_bytes())
    for compiler in ("numba", "llvmlite"):  # to import numba takes longer than all else that a server does at its start
        found = find_spec(compiler)
        digest.update(Path(found.origin).with_name("_version.py").read_bytes() if found and found.origin else b"")
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    depends = (np.__version__, sys.version, platform.machine(), str(MEAN_LANES), *processor)
    digest.update("\0".join(depends).encode())
    return digest.hexdigest()[:16]
