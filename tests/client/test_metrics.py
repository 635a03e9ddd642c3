"""Metrics outside every strategy: their numbers, beside those of scikit-learn or of their definition, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage import errors

RNG = np.random.default_rng(7)
LABELS = (RNG.random(400) < 0.4).astype(np.float32)
CHANCES = np.clip(0.35 * LABELS + 0.65 * RNG.random(400), 0, 1).astype(np.float32)
WEIGHTS = RNG.integers(0, 4, 400).astype(np.float32)


def fed(metric: cs.metrics.Metric, *args: Any, **kwargs: Any) -> Any:
    """The result of a metric that got the rows in three unequal parts."""
    for part in (slice(0, 7), slice(7, 300), slice(300, None)):
        metric.update_state(*(x[part] for x in args), **{key: x[part] for key, x in kwargs.items()})
    return metric.result()


class BinaryTruePositives(cs.metrics.Metric):
    """As TensorFlow's page on metrics writes one."""

    def __init__(self, name: str = "binary_true_positives", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_weight(name="tp", initializer="zeros")
        self.rows = self.add_weight(
            shape=[2], initializer=lambda shape, dtype: np.full(shape, 3, dtype), name="rows", dtype="int32"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_true, y_pred = np.asarray(y_true, bool), np.asarray(y_pred, bool)
        self.true_positives.assign_add(np.sum(y_true & y_pred, dtype=np.float32))

    def result(self) -> Any:
        return self.true_positives


def test_a_metric_of_the_users_names_the_initial_values() -> None:
    metric = BinaryTruePositives()
    metric.update_state([0, 1, 1, 1], [0, 1, 0, 1])
    assert float(metric.result().numpy()) == 2
    assert (metric.rows.dtype, metric.rows.numpy().tolist()) == (np.int32, [3, 3])
    assert metric.add_weight("one", (2,), initializer="ones").numpy().tolist() == [1, 1]
    metric.reset_state()
    assert [variable.numpy().tolist() for variable in metric.variables] == [0, [0, 0]]
    with pytest.raises(errors.InvalidArgumentError, match=r"initializer must be .*not 'glorot'"):
        metric.add_weight("other", initializer="glorot")
    with pytest.raises(errors.InvalidArgumentError, match="shape"):
        metric.add_weight("other", (2,), initializer=lambda shape, dtype: np.zeros(3, dtype))


class Shares(cs.metrics.Metric):
    """The share of each class, and precision: state in a list, in a dict and in another metric."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = [self.add_weight(f"hits_{number}") for number in range(2)]
        self.counts = {"rows": self.add_weight("rows")}
        self.precision = cs.metrics.Precision()
        self.again = self.precision

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        for number, hits in enumerate(self.hits):
            hits.assign_add(np.float32(np.sum(np.equal(y_true, number))))
        self.counts["rows"].assign_add(np.float32(len(y_true)))
        self.precision.update_state(y_true, y_pred)

    def result(self) -> Any:
        shares = [hits.numpy() / self.counts["rows"].numpy() for hits in self.hits]
        return np.stack([*shares, self.precision.result()])


def test_state_in_lists_dicts_and_other_metrics_is_reset_and_merged() -> None:
    metric, other = Shares(), Shares()
    metric.update_state([0, 1, 1, 1], [0, 1, 1, 0])
    assert metric.result().tolist() == [0.25, 0.75, 1]
    assert [variable.name for variable in metric.variables] == [
        "shares/hits_0",
        "shares/hits_1",
        "shares/rows",
        "precision/true_positives",
        "precision/false_positives",
    ]
    other.update_state([0, 0, 0, 0], [1, 1, 0, 0])
    metric.merge_state([other])
    assert metric.result().tolist() == [0.625, 0.375, 0.5]
    metric.reset_state()
    metric.update_state([0], [1])
    assert metric.result().tolist() == [1, 0, 0]


def test_metrics_that_hold_each_other_have_each_state_once() -> None:
    inner, outer = cs.metrics.Mean(), Shares()
    vars(outer)["inner"], vars(inner)["outer"] = inner, outer
    assert [len(metric.variables) for metric in (inner, outer)] == [7, 7]


def test_a_metric_can_be_called() -> None:
    mean = cs.metrics.Mean()
    assert float(mean([1.0, 3.0])) == 2.0
    assert float(mean(8.0, sample_weight=2)) == 5.0
    mean.reset_states()
    assert float(mean.result()) == 0.0


def test_metrics_of_a_class_are_merged() -> None:
    one, other = cs.metrics.Mean(), cs.metrics.Mean()
    one.update_state([1.0, 2.0])
    other.update_state([6.0])
    one.merge_state([other])
    assert float(one.result()) == 3.0
    with pytest.raises(errors.InvalidArgumentError, match="another state"):
        one.merge_state([cs.metrics.Sum()])
    with pytest.raises(errors.InvalidArgumentError, match="another state"):
        cs.metrics.AUC(3).merge_state([cs.metrics.AUC(4)])


@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.5, 1.0])
def test_precision_and_recall_are_those_of_scikit_learn(threshold: float) -> None:
    from sklearn import metrics as scores  # every process of the tests would import it, and one needs it

    predicted = np.float32(threshold) < CHANCES
    for metric, reference in (
        (cs.metrics.Precision(threshold), scores.precision_score),
        (cs.metrics.Recall(threshold), scores.recall_score),
    ):
        expected = reference(LABELS, predicted, sample_weight=WEIGHTS, zero_division=0)
        assert float(fed(metric, LABELS, CHANCES, sample_weight=WEIGHTS)) == pytest.approx(expected, rel=1e-6)


def test_several_thresholds_give_one_number_each_in_their_order() -> None:
    from sklearn import metrics as scores

    found = fed(cs.metrics.Recall([0.7, 0.2]), LABELS, CHANCES)
    expected = [scores.recall_score(LABELS, np.float32(at) < CHANCES) for at in (0.7, 0.2)]
    assert found.shape == (2,)
    assert found == pytest.approx(expected, rel=1e-6)


def test_top_k_and_class_id_choose_predictions() -> None:
    truth = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1]])
    chances = np.array([[0.1, 0.9, 0.6], [0.4, 0.4, 0.2], [0.3, 0.6, 0.5]])
    assert float(cs.metrics.Precision(top_k=1)(truth, chances)) == pytest.approx(2 / 3)
    assert float(cs.metrics.Recall(top_k=2)(truth, chances)) == 1.0
    assert float(cs.metrics.Precision(class_id=2)(truth, chances)) == 0.0
    assert float(cs.metrics.Recall(class_id=1, top_k=1)(truth, chances)) == 1.0
    with pytest.raises(errors.InvalidArgumentError, match="at least 4 classes"):
        cs.metrics.Precision(top_k=4)(truth, chances)


def by_definition(curve: str, method: str, thresholds: np.ndarray) -> float:
    """The area under the curve, threshold by threshold."""
    tp = np.array([float(WEIGHTS[(t < CHANCES) & (LABELS == 1)].sum()) for t in thresholds])
    fp = np.array([float(WEIGHTS[(t < CHANCES) & (LABELS == 0)].sum()) for t in thresholds])
    p, n = float(WEIGHTS[LABELS == 1].sum()), float(WEIGHTS[LABELS == 0].sum())
    total = 0.0
    for k in range(len(thresholds) - 1):
        if curve == "PR" and method == "interpolation":
            slope = (tp[k] - tp[k + 1]) / d if (d := tp[k] + fp[k] - tp[k + 1] - fp[k + 1]) > 0 else 0.0
            start = tp[k + 1] - slope * (tp[k + 1] + fp[k + 1])
            ends = tp[k] + fp[k], tp[k + 1] + fp[k + 1]
            log = np.log(ends[0] / ends[1]) if min(ends) > 0 else 0.0
            total += slope * (tp[k] - tp[k + 1] + start * log) / p
            continue
        x = fp / n if curve == "ROC" else tp / p
        y = tp / p if curve == "ROC" else np.divide(tp, tp + fp, out=np.zeros_like(tp), where=tp + fp > 0)
        height: dict[str, Callable[[float, float], float]] = {
            "interpolation": lambda a, b: (a + b) / 2,
            "minoring": min,
            "majoring": max,
        }
        total += (x[k] - x[k + 1]) * height[method](y[k], y[k + 1])
    return total


@pytest.mark.parametrize("method", ["interpolation", "minoring", "majoring"])
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_the_area_is_that_of_the_definition(curve: str, method: str) -> None:
    metric = cs.metrics.AUC(21, curve, method)
    thresholds = np.array([-1e-7, *np.arange(1, 20) / 20, 1 + 1e-7], np.float32)
    found = float(fed(metric, LABELS, CHANCES, sample_weight=WEIGHTS))
    assert found == pytest.approx(by_definition(curve, method, thresholds), rel=1e-5)


def test_the_area_comes_near_that_of_all_thresholds() -> None:
    from sklearn import metrics as scores

    assert float(fed(cs.metrics.AUC(2000), LABELS, CHANCES)) == pytest.approx(
        scores.roc_auc_score(LABELS, CHANCES), abs=1e-3
    )
    exact = scores.average_precision_score(LABELS, CHANCES)
    assert float(fed(cs.metrics.AUC(2000, "PR"), LABELS, CHANCES)) == pytest.approx(exact, abs=3e-3)


def test_areas_of_several_labels_are_averaged() -> None:
    truth = np.stack([LABELS, 1 - LABELS], axis=1)
    chances = np.stack([CHANCES, CHANCES], axis=1)
    one = float(fed(cs.metrics.AUC(50), LABELS, CHANCES))
    both = fed(cs.metrics.AUC(50, multi_label=True, num_labels=2), truth, chances)
    assert float(both) == pytest.approx((one + 1 - one) / 2, abs=1e-5)
    weighted = fed(cs.metrics.AUC(50, multi_label=True, label_weights=[3.0, 1.0]), truth, chances)
    assert float(weighted) == pytest.approx((3 * one + 1 - one) / 4, abs=1e-5)
    flat = fed(cs.metrics.AUC(50, label_weights=[1.0, 0.0]), truth, chances)
    assert float(flat) == pytest.approx(one, rel=1e-6)


def test_logits_become_chances() -> None:
    logits = np.linspace(-900, 900, 50, dtype=np.float32)
    truth = (np.arange(50) % 3 == 0).astype(int)
    found = cs.metrics.AUC(from_logits=True)(truth, logits)
    assert float(found) == float(cs.metrics.AUC()(truth, 1 / (1 + np.exp(-np.clip(logits, -80, 80)))))


def test_a_mean_of_errors_is_over_rows() -> None:
    truth, predicted = [[0.0, 1.0], [2.0, 2.0]], [[1.0, 3.0], [2.0, 1.0]]
    assert float(cs.metrics.MeanSquaredError()(truth, predicted)) == 1.5
    assert float(cs.metrics.MeanAbsoluteError()(truth, predicted)) == 1.0
    assert float(cs.metrics.RootMeanSquaredError()(truth, predicted)) == pytest.approx(1.5**0.5)
    assert float(cs.metrics.MeanSquaredError()(truth, predicted, sample_weight=[3, 1])) == (3 * 2.5 + 0.5) / 4
    assert float(cs.metrics.MeanSquaredError()([1.0, 2.0], [[1.0], [4.0]])) == 2.0
    rows = cs.metrics.MeanSquaredError()
    rows.update_state([1.0, 2.0], [1.0, 4.0])
    assert float(rows.count.numpy()) == 1.0  # as in TensorFlow: the last axis is averaged, whatever it is


def test_binary_and_categorical_accuracy() -> None:
    assert float(cs.metrics.BinaryAccuracy(threshold=0.3)([1, 0, 0], [[0.4], [0.3], [0.9]])) == pytest.approx(2 / 3)
    truth, chances = np.eye(3)[[0, 1, 2]], np.eye(3)[[0, 2, 2]]
    assert float(cs.metrics.CategoricalAccuracy()(truth, chances)) == pytest.approx(2 / 3)
    assert float(cs.metrics.CategoricalAccuracy()(truth, chances, sample_weight=[0, 1, 1])) == 0.5


def test_names_are_those_of_tensorflow() -> None:
    kinds = [getattr(cs.metrics, name) for name in cs.metrics.__all__ if name != "Metric"]
    assert sorted(kind().name for kind in kinds) == [
        "accuracy", "auc", "binary_accuracy", "categorical_accuracy", "mean", "mean_absolute_error",
        "mean_squared_error", "precision", "recall", "root_mean_squared_error", "sparse_categorical_accuracy", "sum",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: cs.metrics.Precision(1.5), "thresholds must be numbers in"),
        (lambda: cs.metrics.Precision([]), "thresholds must be numbers in"),
        (lambda: cs.metrics.Recall(top_k=0), "top_k must be an int from 1"),
        (lambda: cs.metrics.Recall(class_id=-1), "class_id must be an int from 0"),
        (lambda: cs.metrics.AUC(1), "num_thresholds must be an int from 2"),
        (lambda: cs.metrics.AUC(curve="roc"), "curve must be one of ROC, PR"),
        (lambda: cs.metrics.AUC(summation_method="middle"), "summation_method must be one of"),
        (lambda: cs.metrics.AUC(multi_label=True), "needs num_labels"),
        (lambda: cs.metrics.AUC(label_weights=[-1.0]), "label_weights must be"),
        (lambda: cs.metrics.AUC(multi_label=True, num_labels=2)([1], [0.5]), r"needs predictions \[rows, labels\]"),
        (lambda: cs.metrics.AUC(label_weights=[1.0, 1.0])([[1]], [[0.5]]), "must have 2 labels"),
        (lambda: cs.metrics.AUC()([1, 0], [2.0, 0.0]), "apply the sigmoid"),
        (lambda: cs.metrics.AUC()([1, 0], [np.nan, 0.0]), "apply the sigmoid"),
        (lambda: cs.metrics.AUC()([1, 0], [0.5, 0.5], sample_weight=[1, 2, 3]), "does not fit"),
        (lambda: cs.metrics.MeanSquaredError()([1, 0, 1], [0.5, 0.5]), "must have the same shape"),
        (lambda: cs.metrics.MeanSquaredError()([[1], [0]], [[1, 1], [1, 1]]), "must have the same shape"),
        (lambda: cs.metrics.Mean()("a"), r"metric mean: values must be numbers, not texts such as \['a'\]; convert"),
        (lambda: cs.metrics.Mean()(None), "metric mean: values must be numbers: None cannot become an array"),
        (lambda: cs.metrics.Sum()([1.0], sample_weight="2"), "metric sum: sample_weight must be numbers, not texts"),
        (lambda: cs.metrics.BinaryAccuracy()(["1"], [0.5]), "labels must be numbers, not texts"),
        (lambda: cs.metrics.BinaryAccuracy()([1], ["0.5"]), "predictions must be numbers, not texts"),
        (lambda: cs.metrics.SparseCategoricalAccuracy()(["1"], [[0, 1]]), "labels must be numbers, not texts"),
        (lambda: cs.metrics.SparseCategoricalAccuracy()([1], [["0", "1"]]), "predictions must be numbers, not texts"),
        (lambda: cs.metrics.AUC(from_logits=True)([1], ["a"]), "predictions must be numbers, not texts"),
        (lambda: cs.metrics.AUC()([1], [0.5], sample_weight="a"), "sample_weight must be numbers, not texts"),
    ],
)
def test_a_wrong_argument_is_named(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=says):
        wrong()
