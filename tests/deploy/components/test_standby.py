"""Two brokers, of which one leads: what the component says about addresses, and who is reported without a database."""

from collections.abc import Callable

import pytest

from gspo_services.prepare.cluster_check import endpoints
from gspo_services.prepare.cluster_check.model import ClusterModel
from gspo_services.prepare.cluster_check.redundancy import numbers
from tests.deploy.cluster import K8S, Cluster
from tests.deploy.edits import container, edit_config

pytestmark = pytest.mark.deploy
Variant = Callable[[str], Cluster]
COMPONENT = K8S / "components" / "standby-broker" / "kustomization.yaml"


def addresses(key: str) -> str:
    """The line of the component's comment, without its mark."""
    lines = [line.removeprefix("#").strip() for line in COMPONENT.read_text(encoding="utf-8").splitlines()]
    return next(line for line in lines if line.startswith(f"{key} = "))


@pytest.fixture
def both(cluster: Variant) -> Cluster:
    """The overlay with both brokers' addresses in run.toml, as the component asks for."""
    found = cluster("cpu-standby")
    edit_config(found, 'work_endpoint = "tcp://broker:7001"', addresses("work_endpoint"))
    edit_config(found, 'batch_endpoint = "tcp://broker:7002"', addresses("batch_endpoint"))
    return found


def test_both_addresses_are_names_of_the_brokers(both: Cluster) -> None:
    assert "broker-1.broker:7001" in both.config
    assert list(endpoints.addresses(ClusterModel.of(both.objects))) == []


def test_the_address_of_a_third_broker_is_reported(both: Cluster) -> None:
    edit_config(both, "broker-1.broker:7001", "broker-2.broker:7001")
    (fault,) = endpoints.addresses(ClusterModel.of(both.objects))
    assert "broker-2.broker is no name of StatefulSet/broker: broker, broker-0.broker, broker-1.broker" in fault.text


def test_two_brokers_without_a_database_are_two_ledgers(cluster: Variant) -> None:
    found = cluster("cpu-standby")
    assert list(numbers(ClusterModel.of(found.objects))) == []
    own = container(found, "broker")
    own["env"] = [each for each in own["env"] if each["name"] != "GSPO_BROKER__DATABASE"]
    (fault,) = numbers(ClusterModel.of(found.objects))
    assert fault.text.startswith("2 brokers: each has a ledger of its own")
    assert fault.way_out.startswith("write replicas: 1; or let one of them lead (components/standby-broker)")
