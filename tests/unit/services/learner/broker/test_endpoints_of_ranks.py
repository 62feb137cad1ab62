"""Where the ranks of a learner serve their parts, and where others find them."""

import socket

import pytest

from gspo_services.learner.broker.publisher import own_endpoint, reachable_endpoint


@pytest.mark.parametrize(
    ("endpoint", "local_rank", "expected"),
    [
        ("tcp://0.0.0.0:7003", 0, "tcp://0.0.0.0:7003"),
        ("tcp://0.0.0.0:7003", 3, "tcp://0.0.0.0:7006"),
        ("tcp://[::1]:7003", 1, "tcp://[::1]:7004"),
        ("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", 1, "tcp://127.0.0.1:0"),
    ],
)
def test_each_rank_of_a_machine_has_the_next_port(endpoint: str, local_rank: int, expected: str) -> None:
    assert own_endpoint(endpoint, local_rank) == expected


@pytest.mark.parametrize(
    ("bound", "towards", "expected"),
    [
        ("tcp://127.0.0.1:7004", "127.0.0.1", "tcp://127.0.0.1:7004"),
        ("tcp://10.0.3.7:7004", "10.0.3.1", "tcp://10.0.3.7:7004"),
        ("tcp://0.0.0.0:7004", "127.0.0.1", "tcp://learner-0.learner:7004"),
        ("tcp://0.0.0.0:7004", "localhost", "tcp://learner-0.learner:7004"),
    ],
)
def test_others_find_a_rank_where_it_is_bound_or_on_the_advertised_host(bound: str, towards: str, expected: str) -> None:
    assert reachable_endpoint(bound, advertised="tcp://learner-0.learner:7003", towards=towards) == expected


def test_a_rank_of_another_machine_is_found_at_the_address_of_its_way_out() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        try:
            way_out.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way out")
        own = way_out.getsockname()[0]
    found = reachable_endpoint("tcp://0.0.0.0:7003", advertised="tcp://learner-0.learner:7003", towards="192.0.2.1")
    assert found == f"tcp://{own}:7003"
