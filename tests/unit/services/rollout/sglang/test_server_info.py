"""What a server says about its ranks."""

from typing import Any

import pytest

from gspo_services.rollout.sglang.server_info import Checksums, Placed, Rank, RankChecksums, ServerInfo, by_rank
from gspo_services.shared.weights import Spread


def info(**changes: Any) -> ServerInfo:
    return ServerInfo(**{"version": "0", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "m"} | changes)


def answer(*places: tuple[int, int | None]) -> Checksums:
    return Checksums(
        ranks=[Rank(checksums={"w": f"{at}"}, parallelism_info=[Placed(tp_rank=at, dp_rank=copy)]) for at, copy in places]
    )


def test_a_servers_ranks_are_what_it_says() -> None:
    assert info().spread == Spread()
    assert info(tp_size=4, ep_size=2, dp_size=3).spread == Spread(tensor=4, expert=2, data=3)
    assert info(moe_dense_tp_size=1).spread == Spread(), "of one rank there is nothing to cut"


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--pp-size", {"pp_size": 2}),
        ("--attn-cp-size", {"attn_cp_size": 2}),
        ("--dcp-size", {"dcp_size": 2}),
        ("--moe-dp-size", {"moe_dp_size": 2}),
        ("--moe-dense-tp-size", {"moe_dense_tp_size": 1}),
        ("--ep-num-redundant-experts", {"ep_num_redundant_experts": 2}),
        ("--enable-dp-attention", {"enable_dp_attention": True}),
        ("--enable-eplb", {"enable_eplb": True}),
    ],
)
def test_a_way_of_sharing_that_nobody_has_verified_is_named(option: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"was started with {option}: .*use rollout\.tensor_parallel"):
        _ = info(tp_size=2, **changes).spread


@pytest.mark.parametrize(
    ("option", "changes", "reason"),
    [
        ("--quantization fp8", {"quantization": "fp8"}, "does not hold the weights that were sent"),
        ("--load-format flash_rl", {"load_format": "flash_rl"}, "does not hold the weights that were sent"),
        ("--load-format dummy", {"load_format": "dummy"}, "does not hold the weights that were sent"),
        ("--speculative-algorithm NGRAM", {"speculative_algorithm": "NGRAM"}, "never compared with the learner's"),
        ("--preferred-sampling-params .*min_p", {"preferred_sampling_params": {"min_p": 0.1}}, "changes what is sampled"),
        ("--json-model-override-args .*rope", {"json_model_override_args": '{"rope_theta": 1}'}, "train another one"),
        ("--disaggregation-mode decode", {"disaggregation_mode": "decode"}, "a part of one"),
        ("--allow-auto-truncate True", {"allow_auto_truncate": True}, "changes what is sampled"),
    ],
)
def test_a_server_that_is_not_the_learners_policy_is_named(option: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"was started with {option}.*: .*{reason}"):
        info(**changes).require_learners_policy()
    info(load_format="safetensors", enable_lora=True, tp_size=2).require_learners_policy()
    info(json_model_override_args='{"language_model_only": true}').require_learners_policy()


def test_ranks_are_put_in_order() -> None:
    found = by_rank(answer((1, 1), (0, 0), (1, 0), (0, 1)), Spread(tensor=2, data=2))
    assert [(each.replica, each.rank) for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [each.label for each in found[1:3]] == ["rank 1", "rank 0 of replica 1"]
    assert by_rank(Checksums(ranks=[Rank(checksums={"w": "1"})]), Spread()) == [RankChecksums(checksums={"w": "1"})]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, None)], "checksums of 1 ranks, but the server has 2: rank 1 is missing"),
        ([], "checksums of 0 ranks, but the server has 2: rank 0, rank 1 are missing"),
        ([(0, 0), (0, 0)], "rank 0 has answered twice"),
        ([(0, 0), (1, 0), (2, 0)], "checksums of 3 ranks, but the server has 2: too many"),
    ],
)
def test_a_rank_that_is_missing_is_named(places: list[tuple[int, int | None]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_rank(answer(*places), Spread(tensor=2))
