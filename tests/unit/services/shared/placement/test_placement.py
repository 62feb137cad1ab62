"""Who gets which GPU and which core, and what is refused before anything starts."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.placement import Machine, Placement, placement_of, require_pythons
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings

SHARE = 'rollout.server_args=["--mem-fraction-static", "0.3"]'

TWO = "rollout.tensor_parallel=2"


def placed(*overrides: str, gpus: int | tuple[str, ...] = 0, cores: int = 8) -> Placement:
    names = tuple(map(str, range(gpus))) if isinstance(gpus, int) else gpus
    return placement_of(load_settings(None, overrides, {}), Machine(gpus=names, cores=tuple(range(cores))))


def gpus_of(placement: Placement) -> tuple[Any, list[Any]]:
    return placement.learner.gpus, [place.gpus for place in placement.rollouts]


def test_a_machine_without_gpus_deals_nothing() -> None:
    placement = placed("rollout.num_servers=2")
    assert gpus_of(placement) == (None, [None, None])
    assert placement.text == ""
    assert placement.learner.environment == {}


def test_ranks_have_the_first_gpus_and_servers_the_next() -> None:
    placement = placed("learner.num_ranks=2", "rollout.num_servers=3", gpus=8)
    assert gpus_of(placement) == (("0", "1"), [("2",), ("3",), ("4",)])
    assert placement.text == "learner: GPUs 0, 1; rollout-0: GPU 2; rollout-1: GPU 3; rollout-2: GPU 4"
    assert placement.rollouts[1].environment == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("overrides", "learner", "servers"),
    [
        (["learner.gpus=[3]"], ("3",), ["0", "1"]),
        (["rollout.gpus=[0, 3]"], ("1",), ["0", "3"]),
        (["learner.gpus=[1]", "rollout.gpus=[2, 0]"], ("1",), ["2", "0"]),
        (["rollout.gpus=[2]", SHARE], ("0",), ["2", "2"]),
        (["learner.gpus=[0]", "rollout.gpus=[0, 1]", SHARE], ("0",), ["0", "1"]),
    ],
)
def test_what_is_named_is_kept_and_the_other_side_gets_the_rest(
    overrides: list[str], learner: tuple[str, ...], servers: list[str]
) -> None:
    assert gpus_of(placed("rollout.num_servers=2", *overrides, gpus=4)) == (learner, [(name,) for name in servers])


def test_the_reward_models_gpu_is_nobody_elses_unless_it_is_named_or_the_only_one() -> None:
    chosen = "reward.model_device=cuda:1"
    assert gpus_of(placed("rollout.num_servers=2", chosen, gpus=4)) == (("0",), [("2",), ("3",)])
    one = "rollout.num_servers=1"
    assert gpus_of(placed(chosen, one, "rollout.gpus=[1]", gpus=4)) == (("0",), [("1",)])
    assert gpus_of(placed("reward.model_device=cuda:0", one, SHARE, gpus=1)) == (("0",), [("0",)])
    with pytest.raises(ConfigurationError, match=r"1 of this machine's 2 GPUs are free"):
        placed(chosen, one, gpus=2)


def test_a_server_of_several_ranks_has_as_many_gpus() -> None:
    placement = placed(TWO, "rollout.num_servers=2", gpus=8)
    assert gpus_of(placement) == (("0",), [("1", "2"), ("3", "4")])
    assert placement.text == "learner: GPU 0; rollout-0: GPUs 1, 2; rollout-1: GPUs 3, 4"
    four = placed(TWO, "rollout.data_parallel=2", "rollout.num_servers=1", "rollout.gpus=[3, 1, 2, 5]", gpus=8)
    assert gpus_of(four) == (("0",), [("3", "1", "2", "5")])
    shared = placed(TWO, SHARE, "rollout.num_servers=2", "rollout.gpus=[2, 3]", gpus=4)
    assert gpus_of(shared)[1] == [("2", "3"), ("2", "3")]


def test_numbers_count_among_the_visible_gpus() -> None:
    placement = placed("learner.gpus=[1]", "rollout.gpus=[0]", "rollout.num_servers=1", gpus=("GPU-aa", "GPU-bb"))
    assert gpus_of(placement) == (("GPU-bb",), [("GPU-aa",)])


def test_one_gpu_is_for_all_if_the_servers_say_what_they_take() -> None:
    assert gpus_of(placed("rollout.num_servers=2", SHARE, gpus=1)) == (("0",), [("0",), ("0",)])
    assert gpus_of(placed("rollout.num_servers=0", gpus=1)) == (("0",), [])
    assert gpus_of(placed("rollout.num_servers=1", "run.colocate=true", gpus=1)) == (("0",), [("0",)])
    with pytest.raises(
        ConfigurationError,
        match=r'GPU 0 is for the learner and rollout-0, .*"--mem-fraction-static", "0\.4".* run\.colocate = true',
    ):
        placed("rollout.num_servers=1", gpus=1)


def test_servers_that_run_already_need_no_gpu() -> None:
    placement = placed("rollout.num_servers=1", "rollout.server_url=http://127.0.0.1:30000", "learner.num_ranks=2", gpus=2)
    assert gpus_of(placement) == (("0", "1"), [None])


@pytest.mark.parametrize(
    ("overrides", "gpus", "text"),
    [
        (["learner.gpus=[4]"], 4, r"learner\.gpus names 4: 4 are visible here, numbered from 0"),
        (["rollout.gpus=[0]"], 0, r"rollout\.gpus names 0: none is visible here"),
        (["rollout.gpus=[1, 1]"], 4, r"rollout\.gpus names 1 twice"),
        (["learner.gpus=[0, 1]"], 4, r"learner\.gpus names 2 and learner\.num_ranks is 1: each rank has one GPU"),
        (
            ["learner.num_ranks=3"],
            4,
            r"4 of this machine's 4 GPUs are free, and 3 ranks of the learner and 2 servers want one",
        ),
        (["learner.num_ranks=2"], 1, r"1 of this machine's 1 GPUs are free, and 2 ranks"),
        (["rollout.gpus=[0, 1, 2]"], 4, r"rollout\.gpus names 3 and rollout\.num_servers is 2, with 1 for each"),
        (["rollout.gpus=[0, 1]", "rollout.num_servers=3"], 4, r"num_servers is 3, which the 2 GPUs of rollout\.gpus do not"),
        (["rollout.gpus=[0, 1, 2]", TWO], 4, r"rollout\.gpus names 3, and a server takes 2 .*: name 2, or another multiple"),
        (["rollout.gpus=[0]", TWO], 4, r"rollout\.gpus names 1, and a server takes 2 .*: name 2,"),
        (["rollout.num_servers=1", "rollout.gpus=[0, 1, 2, 3]", TWO], 8, r"is 1, with 2 for each: use .*num_servers = 2"),
        (["rollout.num_servers=3", "rollout.gpus=[0, 1, 2, 3]", TWO], 8, r"which the 2 sets of 2 GPUs"),
        ([TWO], 4, r"4 of this machine's 4 GPUs are free, and 1 rank of the learner and 2 servers of 2 ranks want one each"),
        ([TWO, "rollout.num_servers=1"], 1, r"1 of this machine's 1 GPUs are free"),
        (["rollout.gpus=[1]"], 4, r"GPU 1 is for rollout-0 and rollout-1, and a server takes nearly all"),
        (["learner.gpus=[0]", "rollout.gpus=[0, 1]"], 4, r"GPU 0 is for the learner and rollout-0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(overrides: list[str], gpus: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        placed("rollout.num_servers=2", *overrides, gpus=gpus)


def test_cores_are_dealt_to_neighbours_and_shared_where_there_are_few() -> None:
    placement = placed("rollout.cores=[0, 1, 2, 3, 4]", "learner.cores=[5, 7, 6]", "rollout.num_servers=2")
    assert [place.cores for place in placement.rollouts] == [(0, 1), (2, 3, 4)]
    assert placement.text == "learner: cores 5 to 7; rollout-0: cores 0 to 1; rollout-1: cores 2 to 4"
    few = placed("rollout.cores=[4, 2]", "rollout.num_servers=3")
    assert [place.cores for place in few.rollouts] == [(4,), (2,), (4,)]
    assert few.learner.cores is None


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.cores=[8]", r"rollout\.cores names 8, which this process may not use: it has 0 to 7"),
        ("learner.cores=[1, 1]", r"learner\.cores names 1 twice"),
    ],
)
def test_cores_that_are_not_ours_are_refused(override: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        placed(override)


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    require_pythons(load_settings(None, [f"learner.python={sys.executable}"], {}))
    plain = tmp_path / "python"
    plain.write_text("not a program")
    for path in (tmp_path / "missing", tmp_path, plain):
        with pytest.raises(ConfigurationError, match=r"rollout\.python is .*: there is no such program"):
            require_pythons(load_settings(None, [f"rollout.python={path}"], {}))
