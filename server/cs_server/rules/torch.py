"""The update rules of ``torch.optim``.

The source of the formulas is torch 2.13, the single-tensor functions of ``torch/optim/*.py`` (``_single_tensor_adam``
and so on, and ``_functional.sparse_adam``). Their numbers are computed in double precision. t is the variable's own
count of updates, torch's ``step``.

Every step begins with torch's gradient: ``direction`` is -1 to maximize, ``l2`` adds weight decay to the gradient.
``keep`` is what decoupled weight decay leaves of the variable before the update. Adam's root of ``v / (1 - b2^t)`` is
not divided: rate and epsilon are multiplied by ``sqrt(1 - b2^t)`` instead, which is the same number.

Rows that a sparse gradient does not name change as if the gradient were dense, with zeros for them, so a dense gradient
gives the same result; torch itself takes sparse gradients for SGD, Adagrad and SparseAdam only. SparseAdam leaves these
rows alone.
"""

import math
from collections.abc import Callable

import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters

from .rule import Array, Numbers, Rule, Step, accumulator, zeros

# The steps. Rules of optax share some of them.


def torch_sgd(w: Array, g: Array, direction: Array, l2: Array, rate: Array) -> Step:
    return (w - rate * (direction * g + l2 * w),)


def torch_sgd_momentum(
    w: Array,
    g: Array,
    b: Array,
    direction: Array,
    l2: Array,
    rate: Array,
    keep: Array,
    add: Array,
    of_g: Array,
    of_b: Array,
) -> Step:
    g = direction * g + l2 * w
    b = keep * b + add * g
    return w - rate * (of_g * g + of_b * b), b


def torch_adam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    direction: Array,
    l2: Array,
    keep: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return keep * w - rate * m / (np.sqrt(v) + epsilon), m, v


def torch_adam_amsgrad(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    largest: Array,
    direction: Array,
    l2: Array,
    keep: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    largest = np.maximum(largest, v)
    return keep * w - rate * m / (np.sqrt(largest) + epsilon), m, v, largest


def torch_nadam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    direction: Array,
    l2: Array,
    keep: Array,
    rate_g: Array,
    rate_m: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    divisor = np.sqrt(v) + epsilon
    return keep * w - rate_g * g / divisor - rate_m * m / divisor, m, v


# While the variance is not tractable, the divisor is 1: `of_root` is 0 and `epsilon` is 1 then.
def torch_radam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    direction: Array,
    l2: Array,
    keep: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    of_root: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return keep * w - rate * m / (of_root * np.sqrt(v) + epsilon), m, v


def torch_adamax(
    w: Array,
    g: Array,
    m: Array,
    u: Array,
    direction: Array,
    l2: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    m = b1 * m + c1 * g
    u = np.maximum(b2 * u, np.abs(g) + epsilon)
    return w - rate * m / u, m, u


# torch has epsilon beside the root; `floor` is optax's, under it.


def torch_rmsprop(
    w: Array,
    g: Array,
    s: Array,
    direction: Array,
    l2: Array,
    rho: Array,
    c: Array,
    floor: Array,
    epsilon: Array,
    rate: Array,
) -> Step:
    g = direction * g + l2 * w
    s = rho * s + c * (g * g)
    return w - rate * g / (np.sqrt(s + floor) + epsilon), s


def torch_rmsprop_momentum(
    w: Array,
    g: Array,
    s: Array,
    b: Array,
    direction: Array,
    l2: Array,
    rho: Array,
    c: Array,
    floor: Array,
    epsilon: Array,
    keep: Array,
    add: Array,
    of_x: Array,
    of_b: Array,
) -> Step:
    g = direction * g + l2 * w
    s = rho * s + c * (g * g)
    x = g / (np.sqrt(s + floor) + epsilon)
    b = keep * b + add * x
    return w - (of_x * x + of_b * b), s, b


# `share` of the squared mean is taken away: 1 in torch.


def torch_rmsprop_centered(
    w: Array,
    g: Array,
    s: Array,
    mean: Array,
    direction: Array,
    l2: Array,
    rho: Array,
    c: Array,
    share: Array,
    floor: Array,
    epsilon: Array,
    rate: Array,
) -> Step:
    g = direction * g + l2 * w
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    return w - rate * g / (np.sqrt(s - share * (mean * mean) + floor) + epsilon), s, mean


def torch_rmsprop_centered_momentum(
    w: Array,
    g: Array,
    s: Array,
    b: Array,
    mean: Array,
    direction: Array,
    l2: Array,
    rho: Array,
    c: Array,
    share: Array,
    floor: Array,
    epsilon: Array,
    keep: Array,
    add: Array,
    of_x: Array,
    of_b: Array,
) -> Step:
    g = direction * g + l2 * w
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    x = g / (np.sqrt(s - share * (mean * mean) + floor) + epsilon)
    b = keep * b + add * x
    return w - (of_x * x + of_b * b), s, b, mean


def torch_adagrad(w: Array, g: Array, a: Array, direction: Array, l2: Array, rate: Array, epsilon: Array) -> Step:
    g = direction * g + l2 * w
    a = a + g * g
    return w - rate * g / (np.sqrt(a) + epsilon), a


def torch_adadelta(
    w: Array,
    g: Array,
    a: Array,
    x: Array,
    direction: Array,
    l2: Array,
    rate: Array,
    rho: Array,
    c: Array,
    epsilon: Array,
) -> Step:
    g = direction * g + l2 * w
    a = rho * a + c * (g * g)
    d = np.sqrt(x + epsilon) / np.sqrt(a + epsilon) * g
    x = rho * x + c * (d * d)
    return w - rate * d, a, x


# The numbers of the t-th update.


def _gradient(given: Hyperparameters) -> Numbers:
    """Direction and L2 penalty of the gradient."""
    return -1.0 if given.get("maximize") else 1.0, given.get("weight_decay", 0.0)


def _decoupled(given: Hyperparameters) -> Numbers:
    """Direction, L2 penalty, and what decoupled weight decay keeps of the variable."""
    return _gradient(given)[0], 0.0, 1 - given["learning_rate"] * given["weight_decay"]


def _decayed(given: Hyperparameters) -> Numbers:
    """As `_decoupled`, with weight decay of the kind that a flag says."""
    return _decoupled(given) if given.get("decoupled_weight_decay") else (*_gradient(given), 1.0)


def _decays(given: Hyperparameters) -> Numbers:
    """The parts of the old and the new value in both moments."""
    b1, b2 = given["beta_1"], given["beta_2"]
    return b1, 1 - b1, b2, 1 - b2


def _sgd_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_gradient(given), given["learning_rate"]


def _sgd_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    mu = given["momentum"]
    if not mu:  # the buffer stays as it is
        return *_sgd_numbers(given, t), 1.0, 0.0, 1.0, 0.0
    # The first update copies the gradient into the buffer.
    into = (0.0, 1.0) if t == 1 else (mu, 1 - given["dampening"])
    out = (1.0, mu) if given["nesterov"] else (0.0, 1.0)
    return *_sgd_numbers(given, t), *into, *out


def _adams(of_gradient: Callable[[Hyperparameters], Numbers]) -> Callable[..., Numbers]:
    def numbers(given: Hyperparameters, t: int) -> Numbers:
        root = math.sqrt(1 - given["beta_2"] ** t)
        rate = given["learning_rate"] * root / (1 - given["beta_1"] ** t)
        return *of_gradient(given), rate, *_decays(given), given["epsilon"] * root

    return numbers


def _sparse_adam_numbers(given: Hyperparameters, t: int) -> Numbers:
    """torch's SparseAdam adds epsilon to the root before it is corrected."""
    rate = given["learning_rate"] * math.sqrt(1 - given["beta_2"] ** t) / (1 - given["beta_1"] ** t)
    return *_gradient(given), 1.0, rate, *_decays(given), given["epsilon"]


def _rmsprop_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_gradient(given), given["rho"], 1 - given["rho"], 0.0, given["epsilon"], given["learning_rate"]


def _rmsprop_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    *numbers, rate = _rmsprop_numbers(given, t)
    mu = given["momentum"]
    return *numbers, *((mu, 1.0, 0.0, rate) if mu else (1.0, 0.0, rate, 0.0))


def _centered(numbers: Callable[[Hyperparameters, int], Numbers]) -> Callable[[Hyperparameters, int], Numbers]:
    def with_share(given: Hyperparameters, t: int) -> Numbers:
        direction, l2, rho, c, *others = numbers(given, t)
        return direction, l2, rho, c, 1.0, *others

    return with_share


def _adamax_numbers(given: Hyperparameters, t: int) -> Numbers:
    b1 = given["beta_1"]
    return *_gradient(given), given["learning_rate"] / (1 - b1**t), b1, 1 - b1, given["beta_2"], given["epsilon"]


def _nadam_numbers(given: Hyperparameters, t: int) -> Numbers:
    b1, decay = given["beta_1"], given["momentum_decay"]
    root = math.sqrt(1 - given["beta_2"] ** t)
    rate, product, mu_next = given["learning_rate"] * root, _product(b1, decay, t), _mu(b1, decay, t + 1)
    rate_g = rate * (1 - _mu(b1, decay, t)) / (1 - product)
    rate_m = rate * mu_next / (1 - product * mu_next)
    return *_decayed(given), rate_g, rate_m, *_decays(given), given["epsilon"] * root


def _mu(beta_1: float, decay: float, t: int) -> float:
    """NAdam's momentum of update t."""
    return beta_1 * (1 - 0.5 * math.pow(0.96, t * decay))


# Below this a product does not show in 1 - product any more, and every later one is smaller.
_NOTHING = 2.0**-60

#: The last product that was computed for a beta_1 and a decay, and its update: the next one is a factor away.
_products: dict[tuple[float, float], tuple[int, float]] = {}
_MOST_PRODUCTS = 64


def _product(beta_1: float, decay: float, t: int) -> float:
    """The product of NAdam's momenta of updates 1 to t, torch's ``mu_product``."""
    done, product = _products.get((beta_1, decay), (0, 1.0))
    if done > t:
        done, product = 0, 1.0
    while done < t and product >= _NOTHING:
        done += 1
        product *= _mu(beta_1, decay, done)
    if len(_products) >= _MOST_PRODUCTS:
        _products.clear()
    _products[beta_1, decay] = done, product
    return product


def _radam_numbers(given: Hyperparameters, t: int) -> Numbers:
    b2 = given["beta_2"]
    rate, rest = given["learning_rate"] / (1 - given["beta_1"] ** t), 1 - b2**t
    longest = 2 / (1 - b2) - 1
    length = longest - 2 * t * b2**t / rest
    divisor = 0.0, 1.0
    if length > 5:
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rate, divisor = rate * math.sqrt(rest) * math.sqrt(rectified), (1.0, given["epsilon"])
    return *_decayed(given), rate, *_decays(given), *divisor


def _adagrad_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_gradient(given), given["learning_rate"] / (1 + (t - 1) * given["lr_decay"]), given["epsilon"]


def _adadelta_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_gradient(given), given["learning_rate"], given["rho"], 1 - given["rho"], given["epsilon"]


RULES = (
    Rule("torch_sgd", torch_sgd, _sgd_numbers, decays=True),
    Rule("torch_sgd_momentum", torch_sgd_momentum, _sgd_momentum_numbers, zeros(1), "all"),
    Rule("torch_adam", torch_adam, _adams(_decayed), zeros(2), "all", is_real=True),
    Rule("torch_adam_amsgrad", torch_adam_amsgrad, _adams(_decayed), zeros(3), "all", is_real=True),
    Rule("torch_adamw", torch_adam, _adams(_decoupled), zeros(2), "all", is_real=True),
    Rule("torch_adamw_amsgrad", torch_adam_amsgrad, _adams(_decoupled), zeros(3), "all", is_real=True),
    Rule("torch_sparse_adam", torch_adam, _sparse_adam_numbers, zeros(2), is_real=True),
    Rule("torch_rmsprop", torch_rmsprop, _rmsprop_numbers, zeros(1), "slots", is_real=True, decays=True),
    Rule("torch_rmsprop_momentum", torch_rmsprop_momentum, _rmsprop_momentum_numbers, zeros(2), "all", is_real=True),
    Rule(
        "torch_rmsprop_centered",
        torch_rmsprop_centered,
        _centered(_rmsprop_numbers),
        zeros(2),
        "slots",
        is_real=True,
        decays=True,
    ),
    Rule(
        "torch_rmsprop_centered_momentum",
        torch_rmsprop_centered_momentum,
        _centered(_rmsprop_momentum_numbers),
        zeros(3),
        "all",
        is_real=True,
    ),
    Rule("torch_adamax", torch_adamax, _adamax_numbers, zeros(2), "all", is_real=True),
    Rule("torch_nadam", torch_nadam, _nadam_numbers, zeros(2), "all", is_real=True),
    Rule("torch_radam", torch_radam, _radam_numbers, zeros(2), "all", is_real=True),
    Rule("torch_adagrad", torch_adagrad, _adagrad_numbers, accumulator, is_real=True, decays=True),
    Rule("torch_adadelta", torch_adadelta, _adadelta_numbers, zeros(2), "slots", is_real=True, decays=True),
)
