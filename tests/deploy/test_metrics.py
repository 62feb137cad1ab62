"""Every metric in a query of the manifests is exported by a process, or recorded by a rule."""

from collections.abc import Callable

import pytest

from tests.deploy.cluster import Cluster
from tests.deploy.conftest import VARIANTS
from tests.deploy.edits import edit_query, edit_rule
from tests.deploy.metrics import unknown

pytestmark = pytest.mark.deploy
MISTAKES: dict[str, tuple[str, str, Callable[[Cluster], object]]] = {
    "a metric that no process exports": (
        "single-gpu-node-scaled", "gspo_broker_lag_average_versions",
        lambda c: edit_rule(c, "gspo_broker_lag_mean_versions", "gspo_broker_lag_average_versions"),
    ),
    "a counter without its _total": (
        "single-gpu-node-scaled", "gspo_learner_wait_seconds",
        lambda c: edit_rule(c, "gspo_learner_wait_seconds_total", "gspo_learner_wait_seconds"),
    ),
    "a query of a series that no rule records": (
        "single-gpu-node-scaled", "gspo_rollouts_needed",
        lambda c: edit_query(c, "gspo_rollouts_wanted", "gspo_rollouts_needed"),
    ),
    "an external metric that no rule records": (
        "cpu-monitored", "gspo_rollouts_wanted", lambda c: c.objects.remove(c.one("PrometheusRule", "gspo")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_is_known(variant: str, cluster: Callable[[str], Cluster]) -> None:
    assert list(unknown(cluster(variant))) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_metric_that_is_not_there_is_found(name: str, cluster: Callable[[str], Cluster]) -> None:
    variant, metric, make = MISTAKES[name]
    objects = cluster(variant)
    make(objects)
    assert any(text.endswith(f"no process exports {metric}") for text in unknown(objects)), list(unknown(objects))
