"""Data sets: pipelines of NumPy arrays, called as ``cs.data.Dataset`` with the names of ``tf.data``.

A data set is an immutable description; each ``iter`` runs it from the beginning. A chain that only picks rows of arrays
(slices, shuffle, take, skip, shard, repeat, cache) passes row numbers on, and ``batch`` indexes the arrays once for
each batch. From the first ``map``, ``filter`` or ``batch`` on, the chain passes the elements themselves. Elements are
nests (tuples, dicts) of arrays. Rows and batches of the arrays that a data set was made from may be views, so they are
read-only. This module does not know strategies; ``distributed`` splits the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import numpy as np
import optree

from cs_proto.errors import InvalidArgumentError, NotADatasetError

from . import transforms
from .arguments import at_least, check_flag, check_unused, index_of, signature_of, spread
from .element_spec import TensorSpec, observed, zeros
from .pipeline import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Pipeline, Plan

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Dataset", "numpy_dataset"]


class Dataset(Pipeline):
    """A sequence of elements, each a nest of arrays, that may be iterated again and again.

    :meth:`from_tensor_slices`, :meth:`from_tensors`, :meth:`from_generator`, :meth:`range` and :meth:`zip` make data
    sets. Every other method returns a new data set. Wrong arguments are an ``InvalidArgumentError`` (a ValueError) or,
    where the type is wrong, a TypeError.

    Examples:
        >>> from central_storage.data import Dataset
        >>> for rows in Dataset.range(5).map(lambda x: x * x).batch(2):
        ...     print(rows)
        [0 1]
        [4 9]
        [16]
    """

    __slots__ = ()

    # Where data sets begin

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """One element per row: the rows along axis 0 of every array in a nest. Arrays are not copied.

        Args:
            tensors: A nest (tuples, dicts) of arrays of one length. A list is one array, at any depth.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: There is no array, an array is a scalar, or the lengths differ (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> for x, y in Dataset.from_tensor_slices(([1, 2], [10, 20])):
            ...     print(x, y)
            1 10
            2 20
        """
        check_unused("from_tensor_slices", name=name)
        table = transforms.as_element(tensors)
        shapes = [leaf.shape for leaf in optree.tree_leaves(table, none_is_leaf=True)]
        if not shapes:
            raise InvalidArgumentError("from_tensor_slices needs at least one array")
        if () in shapes:
            raise InvalidArgumentError("from_tensor_slices needs rows, and a scalar has none; use from_tensors")
        if len({shape[0] for shape in shapes}) > 1:
            raise InvalidArgumentError(f"from_tensor_slices needs arrays of one length along axis 0, not {shapes}")
        return _picking(table, range(shapes[0][0]))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """One element: a nest as a whole. Arrays are not copied.

        Args:
            tensors: A nest (tuples, dicts) of arrays. A list is one array, at any depth.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: A leaf cannot become an array (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> list(Dataset.from_tensors([1, 2]))
            [<cs.Tensor: shape=(2,), dtype=int32, numpy=array([1, 2], dtype=int32)>]
        """
        check_unused("from_tensors", name=name)
        element = transforms.as_element(tensors)
        return _picking(optree.tree_map(lambda leaf: leaf[None], element, none_is_leaf=True), range(1))

    @staticmethod
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """The numbers of Python's ``range(*args)`` as scalars.

        Args:
            *args: Stop; start and stop; or start, stop and step.
            output_type: The dtype of the numbers.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: The step is 0, there are more numbers than int64 counts, or ``output_type`` cannot
                hold them (a ValueError).
            TypeError: An argument is no int, or ``output_type`` is no dtype of numbers.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(number) for number in Dataset.range(2, 8, 3)]
            [2, 5]
        """
        check_unused("range", name=name)
        dtype = np.dtype(output_type)
        if dtype.kind not in "iuf":
            raise TypeError(f"range: output_type must be a dtype of numbers, not {dtype}")
        try:
            numbers = range(*args)
            len(numbers)
        except (ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"Dataset.range{args}: {error}") from error
        for number in (*numbers[:1], *numbers[-1:]):
            if dtype.kind in "iu" and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
                raise InvalidArgumentError(f"Dataset.range{args}: {number} does not fit {dtype}")
        return _picking(transforms.Numbers(dtype), numbers)

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements of ``generator(*args)``, which is called anew for every iteration.

        Where neither ``output_signature`` nor ``output_types`` is given, ``element_spec`` looks at the first element.

        Args:
            generator: A function that returns an iterable of elements.
            output_types: A nest (tuples, dicts) of dtypes like an element.
            output_shapes: A nest of shapes like an element; it needs ``output_types``.
            args: The arguments of ``generator``.
            output_signature: A nest (tuples, dicts) of ``TensorSpec`` like an element, in place of the two above. Where
                a TensorSpec stands, an element may have a list, which becomes an array.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: While it is iterated: an element does not fit what was said, or nothing was said and
                it is a list of arrays (a ValueError).
            TypeError: ``generator`` cannot be called, or the elements are described in two ways or with a list.

        Examples:
            >>> from central_storage.data import Dataset
            >>> def squares(n):
            ...     for number in range(n):
            ...         yield number * number
            >>> [int(each) for each in Dataset.from_generator(squares, args=(3,))]
            [0, 1, 4]
        """
        check_unused("from_generator", name=name)
        if not callable(generator):
            raise TypeError(f"from_generator needs a function that returns an iterable, not {generator!r:.200}")
        signature = signature_of(output_types, output_shapes, output_signature)
        stream = transforms.Generated(generator, tuple(args or ()), signature)

        def example() -> Any:
            for element in stream:
                return element
            if signature is None:
                raise InvalidArgumentError(
                    "from_generator: there is no element to infer the signature from; pass output_signature"
                )
            return zeros(signature)

        def spec() -> Any:
            return observed(example(), any_length=True) if signature is None else signature

        return Dataset(Plan(stream, UNKNOWN_CARDINALITY, spec, example))

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Elements together; the data set ends with the shortest.

        Args:
            *args: ``zip(a, b)`` or ``zip((a, b))`` gives pairs, ``zip({"x": a, "y": b})`` dicts.
            datasets: The tuple or dict of data sets, by its older name.
            name: Accepted, without effect.

        Raises:
            TypeError: An argument is no data set, or a list of them.

        Examples:
            >>> from central_storage.data import Dataset
            >>> for left, right in Dataset.zip(Dataset.range(2), Dataset.range(5, 9)):
            ...     print(left, right)
            0 5
            1 6
        """
        check_unused("zip", name=name)
        if bool(args) == (datasets is not None):
            raise TypeError("zip needs data sets, as arguments or as datasets=, and not both")
        nest: Any = datasets if not args else args[0] if len(args) == 1 else args
        parts, treespec = optree.tree_flatten(nest, is_leaf=lambda part: isinstance(part, list), none_is_leaf=True)
        if not parts or not all(isinstance(part, Dataset) for part in parts):
            hint = "; use a tuple in place of a list" if any(isinstance(part, list) for part in parts) else ""
            raise TypeError(f"zip needs data sets, or a tuple or dict of them, not {nest!r:.200}{hint}")
        plans = [part.plan for part in parts]
        if UNKNOWN_CARDINALITY in (plan.count for plan in plans):
            count = UNKNOWN_CARDINALITY
        else:
            count = min((plan.count for plan in plans if plan.count >= 0), default=INFINITE_CARDINALITY)
        if all(plan.table is not None and plan.stream == range(plan.count) for plan in plans):
            zipped = _picking(treespec.unflatten(plan.table for plan in plans), range(count))
        else:
            zipped = Dataset(
                Plan(
                    transforms.Zipped(tuple(plans), treespec),
                    count,
                    lambda: treespec.unflatten(plan.spec() for plan in plans),
                    lambda: treespec.unflatten(plan.example() for plan in plans),
                )
            )
        return reduce(Dataset.with_options, (plan.options for plan in plans if plan.options is not None), zipped)

    # Other elements

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """The results of a function of every element, computed one after the other.

        As in TensorFlow a list that the function returns is a tuple of components; a list further inside becomes one
        array. ``np.stack`` makes one array of several.

        Args:
            map_func: The function. A tuple is spread over its arguments; a named tuple or a dict is one argument.
            num_parallel_calls: Accepted, without effect.
            deterministic: Accepted, without effect: the order is always that of the elements.
            synchronous: Accepted, without effect.
            use_unbounded_threadpool: Accepted, without effect.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: ``num_parallel_calls`` is neither at least 1 nor AUTOTUNE (a ValueError).
            TypeError: ``map_func`` cannot be called, or another argument has the wrong type.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).map(lambda x: 10 * x)]
            [0, 10, 20]
        """
        check_unused(
            "map",
            name=name,
            num_parallel_calls=num_parallel_calls,
            deterministic=deterministic,
            synchronous=synchronous,
            use_unbounded_threadpool=use_unbounded_threadpool,
        )
        function, plan = spread(map_func, "map"), self.plan

        def example() -> Any:
            return transforms.as_result(function(plan.example()))

        def spec() -> Any:
            sources = optree.tree_leaves(plan.spec(), none_is_leaf=True)
            return observed(example(), any_length=any(s.shape is None or s.shape[:1] == (None,) for s in sources))

        return self._derive(transforms.Mapped(plan, function), plan.count, spec, example)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs ``(number, element)`` with int64 numbers.

        Args:
            start: The first number.
            name: Accepted, without effect.

        Raises:
            TypeError: ``start`` is no int.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [(int(n), int(x)) for n, x in Dataset.range(5, 7).enumerate(1)]
            [(1, 5), (2, 6)]
        """
        check_unused("enumerate", name=name)
        origin, plan = index_of(start, "enumerate: start"), self.plan
        return self._derive(
            transforms.Numbered(plan, origin),
            plan.count,
            lambda: (TensorSpec((), np.int64), plan.spec()),
            lambda: (np.int64(origin), plan.example()),
        )

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Elements stacked along a new axis 0.

        Args:
            batch_size: The number of elements of a batch, at least 1.
            drop_remainder: Whether a shorter last batch is dropped.
            num_parallel_calls: Accepted, without effect.
            deterministic: Accepted, without effect: the order is always that of the elements.
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: A number is out of range; while it is iterated: elements differ in shape, dtype or
                structure (a ValueError).
            TypeError: An argument has the wrong type.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [rows.tolist() for rows in Dataset.range(3).batch(2)]
            [[0, 1], [2]]
        """
        check_unused("batch", name=name, num_parallel_calls=num_parallel_calls, deterministic=deterministic)
        check_flag(drop_remainder, "batch: drop_remainder")
        size, plan = at_least(1, batch_size, "batch: batch_size"), self.plan
        stream: Iterable[Any] = (
            transforms.Stacked(plan, size, drop_remainder)
            if plan.table is None
            else transforms.Indexed(plan.table, plan.stream, size, drop_remainder)
        )

        def longer(spec: TensorSpec) -> TensorSpec:
            length = size if drop_remainder else None
            return TensorSpec(None if spec.shape is None else (length, *spec.shape), spec.dtype)

        return self._derive(
            stream,
            self._count(lambda n: n // size if drop_remainder else -(-n // size)),
            lambda: optree.tree_map(longer, plan.spec()),
            lambda: transforms.stack([plan.example()] * (size if drop_remainder else 1)),
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of the elements: the inverse of :meth:`batch`.

        Args:
            name: Accepted, without effect.

        Raises:
            InvalidArgumentError: While it is iterated: the arrays of an element differ in length (a ValueError).

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(3).batch(2).unbatch()]
            [0, 1, 2]
        """
        check_unused("unbatch", name=name)
        plan = self.plan

        def shorter(spec: TensorSpec) -> TensorSpec:
            return TensorSpec(spec.shape and spec.shape[1:], spec.dtype)

        return self._derive(
            transforms.Unbatched(plan),
            UNKNOWN_CARDINALITY,
            lambda: optree.tree_map(shorter, plan.spec()),
            lambda: transforms.first_row(plan.example()),
        )

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """``transformation_func(self)``, for chains of methods.

        Args:
            transformation_func: A function of a data set that returns a data set.

        Raises:
            TypeError: It cannot be called, or returns no data set.

        Examples:
            >>> from central_storage.data import Dataset
            >>> [int(each) for each in Dataset.range(5).apply(lambda data: data.skip(3))]
            [3, 4]
        """
        if not callable(transformation_func):
            raise TypeError(f"apply needs a function of a data set, not {transformation_func!r:.200}")
        found = transformation_func(self)
        if not isinstance(found, Dataset):
            raise TypeError(f"apply: the function must return a data set, not {found!r:.200}")
        return found


def numpy_dataset(numpy_input: Any) -> Dataset:
    """The rows of the NumPy arrays in a nest, as :meth:`Dataset.from_tensor_slices` gives them; a list is stacked.

    What is no array is a ``NotADatasetError`` (an AttributeError), numbers of Python included.
    """
    for leaf in optree.tree_leaves(numpy_input, none_is_leaf=True):
        if not hasattr(leaf, "shape"):
            raise NotADatasetError(
                f"a data set of NumPy arrays must be made of arrays, not of {leaf!r:.100}, a {type(leaf).__name__}; "
                "np.asarray makes one"
            )
    return Dataset.from_tensor_slices(numpy_input)


def _picking(table: Any, numbers: range) -> Dataset:
    def spec() -> Any:
        return optree.tree_map(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), table, none_is_leaf=True)

    return Dataset(Plan(numbers, len(numbers), spec, lambda: transforms.first_row(table), table))
