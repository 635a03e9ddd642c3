"""Metrics of true and false predictions above thresholds: precision, recall, and the area under a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from central_storage.nn import fit_weights
from cs_proto.errors import InvalidArgumentError

from .metric import Metric, aligned, numbers

__all__ = ["AUC", "Precision", "Recall"]

# The first and the last threshold of a curve lie this far outside [0, 1], so that all predictions lie between them.
_MARGIN = 1e-7


class _AboveThresholds(Metric):
    """Counts of positive predictions, right and wrong, or of missed positives: one of each for every threshold."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None,
        top_k: int | None,
        class_id: int | None,
        name: str | None,
        dtype: Any,
    ) -> None:
        super().__init__(name, dtype)
        default = 0.5 if top_k is None else -np.inf
        self.thresholds = [default] if thresholds is None else _checked_thresholds(self, thresholds)
        self.top_k, self.class_id = top_k, class_id
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise InvalidArgumentError(f"metric {self.name}: top_k must be an int from 1, or None, not {top_k!r}")
        if class_id is not None and (isinstance(class_id, bool) or not isinstance(class_id, int) or class_id < 0):
            raise InvalidArgumentError(f"metric {self.name}: class_id must be an int from 0, or None, not {class_id!r}")

    def _chosen(
        self, y_true: Any, y_pred: Any, sample_weight: Any
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Labels, predictions and weights of one shape, for the class and the best k that were asked for."""
        labels, predictions, weights = _checked(self, y_true, y_pred, sample_weight)
        if self.top_k is not None or self.class_id is not None:
            classes = predictions.shape[-1] if predictions.ndim else 0
            most = max(self.top_k or 0, 0 if self.class_id is None else self.class_id + 1)
            if classes < most:
                raise InvalidArgumentError(
                    f"metric {self.name}: top_k={self.top_k} and class_id={self.class_id} need predictions with at "
                    f"least {most} classes in the last axis, not {list(predictions.shape)}"
                )
        if self.top_k is not None:
            order = np.argsort(-predictions, axis=-1, kind="stable")  # of equal ones the first counts, as in TensorFlow
            predictions = predictions.copy()
            np.put_along_axis(predictions, order[..., self.top_k :], -np.inf, axis=-1)
        if self.class_id is not None:
            part = (..., self.class_id)
            return labels[part], predictions[part], weights[part]
        return labels, predictions, weights

    def _share(self, right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
        share = _quotient(right, right + wrong)
        return share[0] if len(self.thresholds) == 1 else share


class Precision(_AboveThresholds):
    """The share of positive predictions that are right: ``true positives / (true positives + false positives)``.

    Args:
        thresholds: A number in [0, 1], or several for a result of that shape. A prediction above it is positive. None:
            0.5; with ``top_k`` every one of the best k is positive.
        top_k: Only the ``top_k`` largest predictions of each row can be positive.
        class_id: Only this class in the last axis counts.
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: A threshold is outside [0, 1], ``top_k`` or ``class_id`` is no such number, or ``dtype``
            is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> precision = cs.metrics.Precision()
        >>> precision.update_state([0, 1, 1, 1], [1, 0, 1, 1])
        >>> round(float(precision.result()), 4)
        0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self.true_positives = self.add_weight("true_positives", (len(self.thresholds),))
        self.false_positives = self.add_weight("false_positives", (len(self.thresholds),))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels: 0 is negative, another number positive.
            y_pred: Predictions in [0, 1], of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each prediction or each row.

        Raises:
            InvalidArgumentError: A prediction is outside [0, 1], or the shapes do not fit (a ValueError).
        """
        labels, predictions, weights = self._chosen(y_true, y_pred, sample_weight)
        positive = labels != 0
        self.true_positives.assign_add(_above(self, predictions, weights * positive).astype(self.dtype))
        self.false_positives.assign_add(_above(self, predictions, weights * ~positive).astype(self.dtype))

    def result(self) -> np.ndarray:
        """The share for each threshold; a scalar if there is one threshold. 0 if nothing was positive."""
        return self._share(self.true_positives.numpy(), self.false_positives.numpy())


class Recall(_AboveThresholds):
    """The share of positive labels that were found: ``true positives / (true positives + false negatives)``.

    Args:
        thresholds: A number in [0, 1], or several for a result of that shape. A prediction above it is positive. None:
            0.5; with ``top_k`` every one of the best k is positive.
        top_k: Only the ``top_k`` largest predictions of each row can be positive.
        class_id: Only this class in the last axis counts.
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.

    Raises:
        InvalidArgumentError: A threshold is outside [0, 1], ``top_k`` or ``class_id`` is no such number, or ``dtype``
            is not a floating-point dtype (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> recall = cs.metrics.Recall()
        >>> recall.update_state([0, 1, 1, 1], [1, 0, 1, 1])
        >>> round(float(recall.result()), 4)
        0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self.true_positives = self.add_weight("true_positives", (len(self.thresholds),))
        self.false_negatives = self.add_weight("false_negatives", (len(self.thresholds),))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels: 0 is negative, another number positive.
            y_pred: Predictions in [0, 1], of that shape (a last axis of one element apart).
            sample_weight: One number, or one for each prediction or each row.

        Raises:
            InvalidArgumentError: A prediction is outside [0, 1], or the shapes do not fit (a ValueError).
        """
        labels, predictions, weights = self._chosen(y_true, y_pred, sample_weight)
        positives = weights * (labels != 0)
        found = _above(self, predictions, positives)
        self.true_positives.assign_add(found.astype(self.dtype))
        self.false_negatives.assign_add((positives.sum(dtype=np.float64) - found).astype(self.dtype))

    def result(self) -> np.ndarray:
        """The share for each threshold; a scalar if there is one threshold. 0 if no label was positive."""
        return self._share(self.true_positives.numpy(), self.false_negatives.numpy())


class AUC(Metric):
    """The area under the ROC curve (recall over the share of false alarms) or under the precision-recall curve.

    The curve has a point for each threshold, and the area is the Riemann sum between them. For ``curve="PR"`` with
    ``"interpolation"``, true positives are interpolated between the points, and precision follows from them (Davis and
    Goadrich, "The relationship between Precision-Recall and ROC curves", 2006).

    Args:
        num_thresholds: The number of thresholds, from 2; they lie evenly in [0, 1].
        curve: ``"ROC"`` or ``"PR"``.
        summation_method: ``"interpolation"``, ``"minoring"`` or ``"majoring"``: the height between two points is that
            in the middle, the lower or the higher.
        name: The name; None for the name of the class.
        dtype: The dtype of the state; None for float32.
        thresholds: The thresholds between 0 and 1 themselves, in place of ``num_thresholds``.
        multi_label: Compute one area for each label in the last axis, and return their mean.
        num_labels: The number of labels, for ``multi_label``.
        label_weights: One weight for each label in the last axis: of its area with ``multi_label``, else of its
            predictions.
        from_logits: Predictions are logits; the sigmoid function makes them chances.

    Raises:
        InvalidArgumentError: An argument is none of these, or ``num_labels`` is missing (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> auc = cs.metrics.AUC(num_thresholds=3)
        >>> auc.update_state([0, 0, 1, 1], [0, 0.5, 0.3, 0.9])
        >>> float(auc.result())
        0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: Any = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, dtype)
        self.curve = _one_of(self, "curve", curve, ("ROC", "PR"))
        methods = ("interpolation", "minoring", "majoring")
        self.summation_method = _one_of(self, "summation_method", summation_method, methods)
        self.thresholds = _of_a_curve(self, num_thresholds, thresholds)
        self.num_thresholds = len(self.thresholds)
        self.multi_label, self.from_logits = bool(multi_label), bool(from_logits)
        self.label_weights = None if label_weights is None else np.array(label_weights, self.dtype)
        if self.label_weights is not None and (self.label_weights.ndim != 1 or (self.label_weights < 0).any()):
            raise InvalidArgumentError(f"metric {self.name}: label_weights must be a list of numbers from 0")
        if self.multi_label and num_labels is None and label_weights is not None:
            num_labels = len(label_weights)
        if self.multi_label and num_labels is None:
            raise InvalidArgumentError(f"metric {self.name}: multi_label=True needs num_labels, the number of labels")
        shape = (self.num_thresholds, num_labels) if self.multi_label and num_labels else (self.num_thresholds,)
        self.true_positives = self.add_weight("true_positives", shape)
        self.true_negatives = self.add_weight("true_negatives", shape)
        self.false_positives = self.add_weight("false_positives", shape)
        self.false_negatives = self.add_weight("false_negatives", shape)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels with predictions.

        Args:
            y_true: Labels: 0 is negative, another number positive.
            y_pred: Predictions in [0, 1] (logits with ``from_logits``), of that shape (a last axis of one element
                apart); ``[rows, labels]`` with ``multi_label``.
            sample_weight: One number, or one for each prediction or each row.

        Raises:
            InvalidArgumentError: A prediction is outside [0, 1], or the shapes do not fit (a ValueError).
        """
        if self.from_logits:
            logits = numbers(self, "predictions", y_pred).astype(self.dtype, copy=False)
            y_pred = np.exp(-np.logaddexp(0, -logits))
        labels, predictions, weights = _checked(self, y_true, y_pred, sample_weight)
        count = None if self.label_weights is None else len(self.label_weights)
        if self.multi_label:
            count = self.true_positives.shape[1]
            if predictions.ndim != 2:
                raise InvalidArgumentError(
                    f"metric {self.name}: multi_label needs predictions [rows, labels], not {list(predictions.shape)}"
                )
        if count is not None and predictions.shape[-1:] != (count,):
            raise InvalidArgumentError(
                f"metric {self.name}: predictions {list(predictions.shape)} must have {count} labels in the last axis"
            )
        if self.label_weights is not None and not self.multi_label:
            weights = weights * self.label_weights
        width = self.true_positives.shape[1] if self.multi_label else 1
        columns = predictions.reshape(-1, width).T
        for above, below, are in (
            (self.true_positives, self.false_negatives, labels != 0),
            (self.false_positives, self.true_negatives, labels == 0),
        ):
            parts = (weights * are).reshape(-1, width).T
            found = np.stack([_above(self, *pair) for pair in zip(columns, parts, strict=True)], axis=-1)
            above.assign_add(found.astype(self.dtype).reshape(above.shape))
            below.assign_add((parts.sum(axis=1, dtype=np.float64) - found).astype(self.dtype).reshape(below.shape))

    def result(self) -> np.ndarray:
        """The area: a scalar of the metric's dtype. 0 before the first example."""
        tp, fp = self.true_positives.numpy(), self.false_positives.numpy()
        tn, fn = self.true_negatives.numpy(), self.false_negatives.numpy()
        if self.curve == "PR" and self.summation_method == "interpolation":
            areas = _interpolated_precision(tp, fp, fn)
        else:
            recall = _quotient(tp, tp + fn)
            x, y = (_quotient(fp, fp + tn), recall) if self.curve == "ROC" else (recall, _quotient(tp, tp + fp))
            height = {
                "interpolation": (y[:-1] + y[1:]) / 2,
                "minoring": np.minimum(y[:-1], y[1:]),
                "majoring": np.maximum(y[:-1], y[1:]),
            }[self.summation_method]
            areas = (x[:-1] - x[1:]) * height
        area = areas.sum(axis=0)
        if self.multi_label:
            ones = np.ones(area.shape, area.dtype)
            weights = ones if self.label_weights is None else self.label_weights
            area = _quotient((area * weights).sum(), weights.sum())
        return np.asarray(area, self.dtype)[()]


def _checked(
    metric: Metric, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Labels, predictions in [0, 1], and weights, of one shape."""
    labels, predictions = aligned(metric, y_true, y_pred)
    outside = predictions[~((predictions >= 0) & (predictions <= 1))]
    if outside.size:
        raise InvalidArgumentError(
            f"metric {metric.name}: predictions must lie in [0, 1], and one is {outside.flat[0]}; if they are logits, "
            "apply the sigmoid function first"
        )
    weights = numbers(metric, "sample_weight", 1 if sample_weight is None else sample_weight)
    weights = fit_weights(predictions, weights.astype(metric.dtype, copy=False))
    try:
        return labels, predictions, np.broadcast_to(weights, predictions.shape)
    except ValueError as error:
        raise InvalidArgumentError(
            f"metric {metric.name}: sample_weight {list(weights.shape)} does not fit predictions "
            f"{list(predictions.shape)}"
        ) from error


def _above(metric: AUC | _AboveThresholds, predictions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weight of the predictions above each threshold of the metric, in float64."""
    thresholds = np.array(metric.thresholds, metric.dtype)
    order = np.argsort(thresholds, kind="stable")
    # The number of thresholds below each prediction.
    passed = np.searchsorted(thresholds[order], predictions.ravel(), side="left")
    sums = np.bincount(passed, weights.ravel().astype(np.float64), minlength=len(order) + 1)
    above = np.empty(len(order))
    above[order] = sums[::-1].cumsum()[::-1][1:]
    return above


def _interpolated_precision(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray) -> np.ndarray:
    """The area below the precision-recall curve between two thresholds: the formula of Davis and Goadrich.

    Between two points the positives P grow with the true positives TP along a line of slope s, so precision is
    ``TP / P`` with ``TP = s P + c``, and its integral over recall is ``s (dTP + c log(P1 / P2)) / (TP2 + FN2)``.
    """
    positives = tp + fp
    gained = tp[:-1] - tp[1:]
    slope = _quotient(gained, np.maximum(positives[:-1] - positives[1:], 0))
    start = tp[1:] - slope * positives[1:]
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = np.where(both, _quotient(positives[:-1], np.maximum(positives[1:], 0)), 1)
    return _quotient(slope * (gained + start * np.log(ratio)), np.maximum(tp[1:] + fn[1:], 0))


def _quotient(numerator: Any, denominator: Any) -> np.ndarray:
    """The quotient; 0 where the denominator is 0."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    zeros = np.zeros(numerator.shape, numerator.dtype)
    quotient: np.ndarray = np.divide(numerator, denominator, out=zeros, where=denominator != 0)
    return quotient


def _checked_thresholds(metric: Metric, thresholds: float | Sequence[float]) -> list[float]:
    try:
        found = [float(x) for x in np.atleast_1d(np.asarray(thresholds, np.float64))]
    except (TypeError, ValueError):
        found = []
    if not found or not all(0 <= x <= 1 for x in found):
        raise InvalidArgumentError(f"metric {metric.name}: thresholds must be numbers in [0, 1], not {thresholds!r}")
    return found


def _of_a_curve(metric: Metric, count: int, thresholds: Sequence[float] | None) -> list[float]:
    if thresholds is not None:
        between = sorted(_checked_thresholds(metric, thresholds))
    elif isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise InvalidArgumentError(f"metric {metric.name}: num_thresholds must be an int from 2, not {count!r}")
    else:
        between = [(k + 1) / (count - 1) for k in range(count - 2)]
    return [-_MARGIN, *between, 1 + _MARGIN]


def _one_of(metric: Metric, what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise InvalidArgumentError(f"metric {metric.name}: {what} must be one of {', '.join(known)}, not {given!r}")
    return given
