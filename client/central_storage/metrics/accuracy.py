"""Accuracies: the share of predictions that are right."""

from __future__ import annotations

from typing import Any

from central_storage.core.values import convert_to_tensor
from central_storage.nn import fit_weights
from cs_proto.errors import InvalidArgumentError

from .metric import MeanOf, aligned, numbers

__all__ = ["Accuracy", "BinaryAccuracy", "CategoricalAccuracy", "SparseCategoricalAccuracy"]


class Accuracy(MeanOf):
    """How often predictions equal labels.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> float(accuracy.result())
        0.75
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels of any shape.
            y_pred: Predictions of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each label.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = convert_to_tensor(y_true), convert_to_tensor(y_pred)
        if y_true.ndim != y_pred.ndim:
            y_true = fit_weights(y_pred, y_true)
        if y_true.shape != y_pred.shape:
            raise InvalidArgumentError(
                f"labels {list(y_true.shape)} and predictions {list(y_pred.shape)} must have the same shape"
            )
        self._take((y_true == y_pred).astype(self.dtype), sample_weight)


class BinaryAccuracy(MeanOf):
    """How often predicted chances lie on the label's side of a threshold.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.
        threshold: A chance above it predicts 1, another 0.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.BinaryAccuracy()
        >>> accuracy.update_state([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]])
        >>> float(accuracy.result())
        0.75
    """

    def __init__(self, name: str | None = None, dtype: Any = None, threshold: float = 0.5) -> None:
        super().__init__(name, dtype)
        self.threshold = float(threshold)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels, 0 or 1, of any shape.
            y_pred: Chances of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each label or each row.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = aligned(self, y_true, y_pred)
        self._take((y_true == (y_pred > self.threshold)).astype(self.dtype), sample_weight)


class CategoricalAccuracy(MeanOf):
    """How often the largest of the predicted numbers is where the largest of the labels is.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.CategoricalAccuracy()
        >>> accuracy.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]])
        >>> float(accuracy.result())
        0.5
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: One-hot labels of shape ``[…, classes]``.
            y_pred: Numbers of that shape.
            sample_weight: One number, or one for each label.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = aligned(self, y_true, y_pred)
        if not y_pred.shape[-1:] or not y_pred.shape[-1]:
            raise InvalidArgumentError(f"metric {self.name}: predictions need at least one class")
        self._take((y_pred.argmax(-1) == y_true.argmax(-1)).astype(self.dtype), sample_weight)


class SparseCategoricalAccuracy(MeanOf):
    """How often the largest of the predicted numbers is that of the label.

    Args:
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> accuracy = cs.metrics.SparseCategoricalAccuracy()
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]])
        >>> float(accuracy.result())
        0.5
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with the largest of the predicted numbers.

        Args:
            y_true: Labels of shape ``[…]`` or ``[…, 1]``.
            y_pred: Numbers of shape ``[…, classes]``.
            sample_weight: One number, or one for each label.

        Raises:
            InvalidArgumentError: The shapes do not fit (a ValueError).
        """
        y_true, y_pred = numbers(self, "labels", y_true), numbers(self, "predictions", y_pred)
        if y_true.ndim == y_pred.ndim and y_true.shape[-1:] == (1,):
            y_true = y_true[..., 0]
        if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
            raise InvalidArgumentError(
                f"labels {list(y_true.shape)} need predictions of that shape with one more axis, the classes, not "
                f"{list(y_pred.shape)}"
            )
        if not y_pred.shape[-1]:
            raise InvalidArgumentError("predictions need at least one class")
        self._take((y_pred.argmax(-1) == y_true).astype(self.dtype), sample_weight)
