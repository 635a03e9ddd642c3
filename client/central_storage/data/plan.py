"""How the elements of a data set come about (:class:`Plan`), and the iterator that gives them to the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import tensors_in
from cs_proto.errors import EndOfIterationError, InvalidArgumentError, OutOfRangeError
from cs_proto.frozen import frozen

from . import transforms
from .options import Options

__all__ = ["END", "DatasetIterator", "OptionalElement", "Plan"]

#: In the place of an element, where there is none.
END: Any = object()


@frozen
class Plan:
    """How the elements of a data set come about. Its iterator gives the elements to the stages of a pipeline."""

    #: The elements; where ``table`` is set, the numbers of its rows that are the elements.
    stream: Iterable[Any]
    #: Their number, or one of the negative constants of ``pipeline``.
    count: int
    spec: Callable[[], Any]
    #: Computes one element to find the spec, without advancing any shuffle.
    example: Callable[[], Any]
    table: Any = None
    options: Options | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream) if self.table is None else transforms.rows(self.table, self.stream)


class DatasetIterator(Closed):
    """The elements of a data set, once, as nests of tensors. ``iter`` of a data set makes one.

    Examples:
        >>> import central_storage as cs
        >>> numbers = iter(cs.data.Dataset.range(2))
        >>> next(numbers).numpy(), numbers.get_next().numpy()
        (np.int64(0), np.int64(1))
        >>> try:
        ...     next(numbers)
        ... except cs.errors.OutOfRangeError as error:
        ...     print(error)
        the data set has ended; iterate it again for more
        >>> numbers.get_next_as_optional().has_value()
        False
        >>> numbers.close()
    """

    def __init__(self, plan: Plan) -> None:
        self._elements: Iterator[Any] = iter(plan)
        self._plan = plan

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        for element in self._elements:
            return tensors_in(element)
        raise EndOfIterationError(_ENDED)

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: There is none.
        """
        for element in self._elements:
            return tensors_in(element)
        raise OutOfRangeError(_ENDED)

    def get_next_as_optional(self) -> OptionalElement:
        """The next element, or word that there is none, without an exception."""
        return OptionalElement(next(self, END))

    def close(self) -> None:
        """End the iteration, and the threads of its ``prefetch``."""
        elements, self._elements = self._elements, iter(())
        if hasattr(elements, "close"):
            elements.close()

    @property
    def element_spec(self) -> Any:
        """As the data set's."""
        return self._plan.spec()


class OptionalElement(Closed):
    """The answer of ``get_next_as_optional``: an element or none."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._element is not END

    def get_value(self) -> Any:
        """The element; ``InvalidArgumentError`` where there is none."""
        if self._element is END:
            raise InvalidArgumentError("the data set has ended; check has_value() first")
        return self._element


_ENDED = "the data set has ended; iterate it again for more"
