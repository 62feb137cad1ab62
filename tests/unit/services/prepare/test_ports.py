"""Ports of a second run on one host."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.broker.store.lock import LedgerLock
from gspo_services.prepare.ports import PortClaims, can_bind, moved_ports
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, override_settings


class Asked(PortClaims):
    """Claims on a made-up host."""

    def __init__(self, is_free: Callable[[int], bool]) -> None:
        super().__init__()
        self.ports: list[int] = []
        self._is_free = is_free

    def claim(self, host: str, port: int) -> bool:
        self.ports.append(port)
        return self._is_free(port)


def settings(directory: Path, *overrides: str) -> Settings:
    return override_settings(Settings(), [f"run.directory={directory}", *overrides])


def moved(directory: Path, taken: set[int], *overrides: str) -> dict[str, str]:
    found = moved_ports(settings(directory, *overrides), Asked(lambda port: port not in taken))
    # They are what a configuration takes.
    override_settings(settings(directory), found)
    return dict(each.split("=") for each in found)


FIRST_RUN = {7001, 7002, 7003, 9101, 9102, 9110, 9111}


def test_a_run_alone_keeps_its_ports(tmp_path: Path) -> None:
    assert moved(tmp_path, set()) == {}


def test_a_second_run_gets_ports_of_its_own(tmp_path: Path) -> None:
    assert moved(tmp_path, FIRST_RUN, "rollout.num_servers=2") == {
        "broker.work_endpoint": "tcp://127.0.0.1:7004",
        "broker.batch_endpoint": "tcp://127.0.0.1:7005",
        "learner.weights_endpoint": "tcp://127.0.0.1:7006",
        "broker.metrics_port": "9103",
        "learner.metrics_port": "9104",
        "rollout.metrics_port": "9112",
    }


def test_rollouts_need_ports_in_a_row(tmp_path: Path) -> None:
    assert moved(tmp_path, {9111, 9114}, "rollout.num_servers=3") == {"rollout.metrics_port": "9115"}


def test_ports_that_others_were_told_stay(tmp_path: Path) -> None:
    outside = ["broker.work_endpoint=tcp://0.0.0.0:7001", "learner.weights_endpoint=tcp://127.0.0.1:7003"]
    outside += [
        "security.allow_plaintext=true",
        "learner.advertised_weights_endpoint=tcp://learner:7003",
        "broker.metrics_port=0",
    ]
    assert set(moved(tmp_path, FIRST_RUN, *outside)) == {
        "broker.batch_endpoint",
        "learner.metrics_port",
        "rollout.metrics_port",
    }


def test_other_ways_to_write_the_loopback_are_kept(tmp_path: Path) -> None:
    overrides = ["broker.work_endpoint=tcp://[::1]:7001", "broker.batch_endpoint=tcp://localhost:7002"]
    found = moved(tmp_path, {7001, 7002}, *overrides)
    assert found == {"broker.work_endpoint": "tcp://[::1]:7004", "broker.batch_endpoint": "tcp://localhost:7005"}


def test_no_port_moves_while_a_broker_of_this_run_is_alive(tmp_path: Path) -> None:
    lock = LedgerLock(tmp_path / LEDGER_FILE)
    try:
        assert moved(tmp_path, FIRST_RUN) == {}
    finally:
        lock.release()
    assert moved(tmp_path, FIRST_RUN) != {}


def test_when_none_is_free_the_error_says_which_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"broker.work_endpoint: port 7001 is taken.*--set broker.work_endpoint=tcp"
    ):
        moved_ports(settings(tmp_path), Asked(lambda port: port > 60000))


@pytest.fixture
def claims() -> Iterator[PortClaims]:
    with closing(PortClaims()) as made:
        yield made


def test_a_port_that_somebody_listens_on_cannot_be_bound(tmp_path: Path, claims: PortClaims) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not can_bind("127.0.0.1", port)
        assert not can_bind("*", port)
        found = moved_ports(settings(tmp_path, f"broker.work_endpoint=tcp://127.0.0.1:{port}"), claims)
        assert [each for each in found if each.startswith("broker.work_endpoint=")]
    assert can_bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.7"])
def test_a_host_that_is_not_this_one_is_left_to_the_process_that_binds_it(host: str) -> None:
    assert can_bind(host, 7001)


def test_ports_of_a_run_that_has_not_bound_them_yet_are_not_given_to_another(tmp_path: Path, claims: PortClaims) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = [f"broker.work_endpoint=tcp://127.0.0.1:{port}", f"learner.metrics_port={port + 20}"]
    first = moved_ports(settings(tmp_path / "first", *own), claims)
    with closing(PortClaims()) as others:
        found = moved_ports(settings(tmp_path / "second", *own), others)
        assert {"broker.work_endpoint", "learner.metrics_port"} <= {each.split("=")[0] for each in found}
        assert not set(found) & set(first)
    claims.close()
    with closing(PortClaims()) as others:
        assert others.claim("127.0.0.1", port), "a claim ends with its run"


def test_what_was_only_tried_is_not_kept(tmp_path: Path, claims: PortClaims) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        row = ["rollout.num_servers=2", f"rollout.metrics_port={port - 1}"]
        (found,) = (each for each in moved_ports(settings(tmp_path, *row), claims) if each.startswith("rollout.metrics"))
        assert found != f"rollout.metrics_port={port - 1}"
        with closing(PortClaims()) as others:
            assert others.claim("127.0.0.1", port - 1) is can_bind("127.0.0.1", port - 1)


def test_a_port_that_may_be_any_is_not_looked_for(tmp_path: Path) -> None:
    asked = Asked(lambda port: True)
    moved_ports(settings(tmp_path, "rollout.metrics_port=0"), asked)
    assert set(asked.ports) == {7001, 7002, 7003, 9101, 9102}


def test_rollouts_move_away_from_ports_of_this_very_run(tmp_path: Path) -> None:
    found = moved(tmp_path, set(), "rollout.num_servers=3", "rollout.metrics_port=9100")
    assert found == {"rollout.metrics_port": "9103"}
