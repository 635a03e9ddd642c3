"""Errors of predicted numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .metric import MeanOf, aligned

__all__ = ["MeanAbsoluteError", "MeanSquaredError", "RootMeanSquaredError"]


class _ErrorMean(MeanOf):
    """The mean of an error over the rows; the error of a row is the mean over its last axis."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        As in TensorFlow the last axis is averaged first, so labels of shape ``[rows]`` count as one row. Give them as
        ``[rows, 1]`` where batches differ in size.

        Args:
            y_true: Numbers of shape ``[…, d]``.
            y_pred: Numbers of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each row.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = aligned(self, y_true, y_pred)
        errors = self._error(y_pred - y_true)
        self._take(errors.mean(axis=-1) if errors.ndim else errors, sample_weight)

    def _error(self, difference: Any) -> Any:
        raise NotImplementedError


class MeanSquaredError(_ErrorMean):
    """The mean of ``(y_pred - y_true) ** 2``.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> error = cs.metrics.MeanSquaredError()
        >>> error.update_state([[0, 1], [0, 0]], [[1, 1], [0, 0]])
        >>> float(error.result())
        0.25
    """

    def _error(self, difference: Any) -> Any:
        return np.square(difference)


class MeanAbsoluteError(_ErrorMean):
    """The mean of ``|y_pred - y_true|``.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> error = cs.metrics.MeanAbsoluteError()
        >>> error.update_state([[0, 1], [0, 0]], [[2, 1], [0, 0]])
        >>> float(error.result())
        0.5
    """

    def _error(self, difference: Any) -> Any:
        return np.abs(difference)


class RootMeanSquaredError(MeanOf):
    """The square root of the mean of ``(y_pred - y_true) ** 2`` over all elements.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> error = cs.metrics.RootMeanSquaredError()
        >>> error.update_state([[0, 1], [0, 0]], [[1, 1], [0, 0]])
        >>> float(error.result())
        0.5
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Numbers of any shape.
            y_pred: Numbers of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each element or each row.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = aligned(self, y_true, y_pred)
        self._take(np.square(y_pred - y_true), sample_weight)

    def result(self) -> np.ndarray:
        """The root: a scalar of the metric's dtype."""
        root: np.ndarray = np.sqrt(super().result())
        return root
