"""Which peer fetches from which: the learner serves a constant number of them, and those that come back to it."""

from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.messages import Source
from gspo_services.learner.weights.fan_out import MAX_ITEMS, FanOut

ITEM = (5, 4)


def a_source(name: str) -> Source:
    return Source(f"tcp://{name}:7004")


def join(fan_out: FanOut, *names: str) -> list[str]:
    """The first choice of each peer; empty: the learner serves it."""
    return [each[0] if each else "" for each in choices(fan_out, *names)]


def choices(fan_out: FanOut, *names: str) -> list[list[str]]:
    """The choices of each peer, the first one first."""
    sources = [fan_out.join(ITEM, name.encode(), a_source(name)) for name in names]
    return [[source.endpoint.removeprefix("tcp://").removesuffix(":7004") for source in each] for each in sources]


def test_the_learner_serves_the_first_peers_and_refers_later_ones_to_earlier_ones() -> None:
    fan_out = FanOut(direct=2, children=2)
    assert join(fan_out, *"abcdefgh") == ["", "", "a", "a", "b", "b", "c", "c"]


def test_each_peer_gets_a_second_choice_if_there_is_one_and_these_are_spread_evenly() -> None:
    fan_out = FanOut(direct=1, children=2)
    assert choices(fan_out, *"abcdef") == [[], ["a"], ["a", "b"], ["b", "a"], ["b", "c"], ["c", "d"]]


def test_both_choices_of_a_peer_that_comes_back_are_dropped() -> None:
    fan_out = FanOut(direct=1, children=2)
    assert choices(fan_out, *"abcd")[3] == ["b", "a"]
    fan_out.came_back(ITEM, b"d")
    assert fan_out.num_failed == 1
    assert choices(fan_out, *"efg") == [["c", "d"], ["c", "e"], ["d", "c"]]


def test_no_peer_is_referred_to_one_that_does_not_serve() -> None:
    fan_out = FanOut(direct=1, children=2)
    assert fan_out.join(ITEM, b"a", None) == []
    assert fan_out.join(ITEM, b"b", a_source("b")) == [], "nobody is there to be sent to"
    assert fan_out.join(ITEM, b"c", None) == [a_source("b")]
    assert fan_out.join(ITEM, b"d", None) == [a_source("b")]
    assert fan_out.join(ITEM, b"e", a_source("e")) == []


def test_a_peer_that_comes_back_is_served_and_no_other_is_referred_to_its_source() -> None:
    fan_out = FanOut(direct=1, children=3)
    assert join(fan_out, *"abc") == ["", "a", "a"]
    assert join(fan_out, "b") == [""], "it asks again: its source may be the reason"
    assert join(fan_out, *"de") == ["b", "b"]
    fan_out.came_back(ITEM, b"c")
    assert fan_out.num_failed == 2
    fan_out.came_back(ITEM, b"c")
    fan_out.came_back(ITEM, b"a")
    fan_out.came_back((9, 9), b"a")
    assert fan_out.num_failed == 2


def test_a_source_of_damage_is_remembered_although_the_peer_now_wants_the_snapshot() -> None:
    fan_out = FanOut(direct=1, children=3)
    assert join(fan_out, *"ab") == ["", "a"]
    assert fan_out.join((5, 0), b"b", a_source("b"), direct=True) == []
    assert join(fan_out, "c") == ["b"]


def test_versions_do_not_mix_and_old_ones_are_forgotten() -> None:
    fan_out = FanOut(direct=1, children=3)
    for version in range(1, MAX_ITEMS + 2):
        assert fan_out.join((version, 0), b"a", a_source("a")) == []
    assert fan_out.join((2, 0), b"b", a_source("b")) == [a_source("a")]
    assert fan_out.join((1, 0), b"b", a_source("b")) == [], "the first was forgotten"


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4))
def test_the_learner_serves_a_constant_number_of_peers_and_none_wait_in_a_ring(num: int, direct: int, children: int) -> None:
    fan_out = FanOut(direct=direct, children=children)
    names = [f"r{index}" for index in range(num)]
    chosen = choices(fan_out, *names)
    parents = [each[0] if each else "" for each in chosen]
    assert parents.count("") == min(num, direct)
    assert all(names.index(source) < index for index, each in enumerate(chosen) for source in each)
    assert all(len(set(each)) == min(2, index) for index, each in enumerate(chosen) if each)
    for index, parent in enumerate(parents):
        assert not parent or names.index(parent) < index
        assert not parent or parents.count(parent) <= children


def join_at(fan_out: FanOut, process: str, address: str, item: tuple[int, int] = ITEM) -> list[str]:
    return [source.endpoint for source in fan_out.join(item, process.encode(), a_source(address))]


def test_a_process_at_the_address_of_another_waits_for_nobody_and_nobody_is_sent_to_the_other() -> None:
    fan_out = FanOut(direct=1, children=3)
    assert join(fan_out, *"abc") == ["", "a", "a"]
    # b and c end, start again at their addresses, and ask again: b, if sent to c, would be waited for by it, and c by b.
    assert join_at(fan_out, "b2", "b") == []
    assert join_at(fan_out, "c2", "c") == []
    assert choices(fan_out, "d") == [["a", "b"]]
    usable = [peer for peer, node in fan_out._trees[ITEM].nodes.items() if node.usable]
    assert usable == [b"a", b"b2", b"c2", b"d"]


def test_the_rule_holds_for_a_version_and_not_for_each_way_to_it() -> None:
    fan_out = FanOut(direct=1, children=3)
    delta, snapshot = (5, 4), (5, 0)
    assert join_at(fan_out, "a", "a", delta) == []
    assert join_at(fan_out, "b", "b", delta) == ["tcp://a:7004"]
    assert join_at(fan_out, "c", "c", snapshot) == []
    assert join_at(fan_out, "a2", "a", snapshot) == [], "b may wait for its address"
    assert join_at(fan_out, "b", "b", snapshot) == [], "others may wait for it"
    assert join_at(fan_out, "d", "d", (6, 0)) == []
    assert join_at(fan_out, "c3", "c", (6, 0)) == ["tcp://d:7004"], "another version"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([(5, 0), (5, 4)])), max_size=40))
def test_nobody_waits_for_itself_whoever_starts_again_at_its_address(
    requests: list[tuple[int, bool, tuple[int, int]]],
) -> None:
    fan_out = FanOut(direct=1, children=2)
    lives: dict[int, int] = {}
    waits_for: dict[int, list[int]] = {}
    for place, starts_again, item in requests:
        lives[place] = lives.get(place, 0) + starts_again
        sources = fan_out.join(item, f"{place}-{lives[place]}".encode(), a_source(str(place)))
        waits_for[place] = [int(source.endpoint.removeprefix("tcp://").removesuffix(":7004")) for source in sources]
        reached, ahead = set[int](), list(waits_for[place])
        while ahead:
            other = ahead.pop()
            if other not in reached:
                reached.add(other)
                ahead += waits_for.get(other, [])
        assert place not in reached
