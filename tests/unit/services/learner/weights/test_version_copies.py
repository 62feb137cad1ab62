"""What is copied for a version: all weights or the adapters, on the first rank or on another."""

from gspo_protocol.messages import Probe
from gspo_services.learner.weights import AdapterCopy, build_snapshot
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.shared.settings.sections import LoraSection, Model, Settings
from tests.support.learner.serving_bigram import ServingBigram


def settings(publish: str) -> Settings:
    return Settings(lora=LoraSection(rank=4, publish=publish), model=Model(dtype="bfloat16"))  # type: ignore[arg-type]


def test_merged_weights_are_copied_as_they_are_served() -> None:
    engine = ServingBigram()
    copied = VersionCopies(engine, settings("merged"), rank=0).copy(9)  # type: ignore[arg-type]
    assert copied is not None
    assert [(each.name, each.dtype) for each in copied.tensors()] == [("table", "bfloat16")]


def test_the_model_below_adapters_is_copied_once() -> None:
    engine = ServingBigram()
    copies = VersionCopies(engine, settings("adapter"), rank=0)  # type: ignore[arg-type]
    first, second = copies.copy(9), copies.copy(9)
    assert isinstance(first, AdapterCopy)
    assert isinstance(second, AdapterCopy)
    assert first.base is second.base
    assert [(each.name, each.dtype) for each in second.tensors()] == [("adapter", "bfloat16")]
    assert engine.asked == ["base", "probe", "adapter", "probe", "adapter"]


def test_other_ranks_take_part_in_the_collectives_of_an_adapter_and_get_nothing() -> None:
    engine = ServingBigram()
    engine.rank = 1
    assert VersionCopies(engine, settings("adapter"), rank=1).copy(9) is None  # type: ignore[arg-type]
    assert engine.asked == ["base", "probe", "adapter"]


def test_another_rank_gets_its_part_of_the_same_layout() -> None:
    engine = ServingBigram()
    engine.rank = 1
    copied = VersionCopies(engine, settings("merged"), rank=1).copy(9)  # type: ignore[arg-type]
    assert copied is not None
    assert ([each.name for each in copied.layout.tensors], list(copied.pieces)) == (["table"], [])


class Probed(ServingBigram):
    """Its probe says how long it is."""

    def version_probe(self, num_tokens: int) -> Probe:
        self.asked.append("of the version")
        return Probe(num_tokens, 5, [-float(num_tokens)], "float32")


def test_a_version_has_the_probe_of_its_own_weights() -> None:
    engine = Probed()
    copies = VersionCopies(engine, settings("merged"), rank=0)
    for number in (1, 2):
        copied = copies.copy(7 * number)
        assert copied is not None
        assert build_snapshot(number, copied).manifest.probe == Probe(7 * number, 5, [-7.0 * number], "float32")
    engine.rank = 1
    assert VersionCopies(engine, settings("adapter"), rank=1).copy(7) is None
    assert engine.asked[:3] == ["of the version", "of the version", "of the version"]
