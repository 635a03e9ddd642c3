"""cs-ctl estimate of models of torch and JAX: what cs-ctl status measures in the middle of the same training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness.processes import ROOT, run, start
from tests.harness.timing import unit
from tests.processes.test_estimate import EXACT, estimated

from central_storage.ctl import services
from central_storage.planning.plan import KINDS

pytestmark = pytest.mark.timeout(unit(200))

#: Steps after which a training is in its middle: all of its memory is there. Of a table, slots are touched as its rows
#: come.
_MIDDLE, _MIDDLE_WITH_TABLES = 20, 100


@pytest.mark.parametrize(
    ("script", "arguments", "is_large", "middle"),
    [
        ("torch_models/convnet.py", ["--epochs", "1000"], False, _MIDDLE),
        ("torch_models/gpt.py", ["--steps", "1000", "--length", "32"], True, _MIDDLE),
        ("torch_models/dlrm.py", ["--epochs", "1000"], True, _MIDDLE_WITH_TABLES),
        ("jax_models/mlp.py", ["--epochs", "1000"], False, _MIDDLE),
        ("jax_models/transformer.py", ["--epochs", "1000", "--pieces", "128"], False, _MIDDLE),
    ],
)
def test_an_estimate_is_what_a_training_takes(script: str, arguments: list[str], is_large: bool, middle: int) -> None:
    """Beside a small model, the most that the server writes down for itself is not little: it counts as other."""
    typed = [str(ROOT / "examples" / script), *arguments]
    [planned] = estimated(*typed, timeout=unit(100))["strategies"]
    with start(*typed, environment={"CS_LOG_DIR": None}) as child:
        measured: dict[str, Any] = {}
        while not measured or measured["state"] == "starting" or (measured["step"] or 0) < middle:
            looked = run("cs-ctl", "status", "--json", str(child.pid))
            assert looked.code in (0, 3), str(looked)  # 3: the script has not made its strategy
            measured = json.loads(looked.out or "{}")
        taken = measured["shared_nbytes"]
        assert child.processes()[0].pid == child.pid  # it trains
    services.clean()  # it is killed at the end
    said = f"planned {planned['by_kind']}, measured {taken}"
    for kind in EXACT:
        assert abs(planned["by_kind"][kind] - taken[kind]) <= 0.05 * taken[kind], said
    counted = [kind for kind in KINDS if is_large or kind != "other"]
    expected, found = (sum(nbytes[kind] for kind in counted) for nbytes in (planned["by_kind"], taken))
    assert abs(expected - found) <= 0.05 * found, said
