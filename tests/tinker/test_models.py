"""Models of clients in one engine: each has the numbers that it would have alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gspo_services.serve.calls import AdamRequest, ClientDatum, LoraRequest, TrainCall, UserError
from gspo_services.serve.training import ClientModels, open_client_models
from gspo_services.shared.settings import load_settings

pytestmark = [pytest.mark.tinker, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
ADAM = AdamRequest(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=50.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientModels]:
    config = tmp_path_factory.mktemp("models") / "serve.toml"
    config.write_text(f'model.path = "{ROOT / "models/tiny"}"\nlora.rank = 8\nlearner.max_tokens_per_micro_batch = 64\n')
    opened = open_client_models(load_settings(config, []))
    yield opened
    opened.close()


def call(indices: range, *, columns: int = 1, forward_only: bool = False) -> TrainCall:
    datums = []
    for index in indices:
        drawn = np.random.default_rng(index).integers(0, 250, 10)
        targets = drawn[1:] if columns == 1 else np.stack([drawn[1:], *[drawn[:-1]] * (columns - 1)], axis=1)
        given = {"weights": np.ones(targets.shape, np.float32)}
        datums.append(ClientDatum(tokens_N=drawn[:-1], targets=targets, given=given))
    return TrainCall(datums=tuple(datums), loss="cross_entropy", options={}, forward_only=forward_only)


def trained(models: ClientModels, names: list[str]) -> dict[str, list[float]]:
    """Losses and norms of fresh models that make a step each time they are named, half of its gradients at a time."""
    for name in set(names):
        models.create(name, LoraRequest(rank=4 if name == "small" else 8, seed=len(name)))
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        losses = [models.train(name, call(half))[1] for half in (range(9), range(9, 18))]
        found[name] += [*losses, models.step(name, ADAM)["grad_norm"]]
    return found


def test_turns_of_others_change_nothing(models: ClientModels) -> None:
    alone = trained(models, ["small"] * 4) | trained(models, ["large"] * 4)
    assert trained(models, ["small", "large"] * 4) == alone
    assert alone["small"][-3] < alone["small"][0]


def test_halves_add_up_also_around_a_turn_of_another(models: ClientModels) -> None:
    norms = []
    models.create("other", LoraRequest(rank=8, seed=3))
    for halves in ([range(18)], [range(9), range(9, 18)]):
        models.create("own", LoraRequest(rank=8, seed=2))
        for half in halves:
            models.train("own", call(half))
            models.train("other", call(range(3)))
        norms.append(models.step("own", ADAM)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert models.step("own", ADAM)["grad_norm"] == 0.0


def test_a_call_that_fails_half_way_leaves_the_gradients_as_they_were(models: ClientModels) -> None:
    models.create("own", LoraRequest(rank=8, seed=2))
    models.train("own", call(range(9)))
    before = call(range(18))
    before.datums[-1].given["weights"][:] = 3e38
    with pytest.raises(UserError, match="datum 17: the loss is "):
        models.train("own", before)
    after = models.step("own", ADAM)["grad_norm"]
    models.create("own", LoraRequest(rank=8, seed=2))
    models.train("own", call(range(9)))
    assert models.step("own", ADAM)["grad_norm"] == after


def test_several_targets_have_the_log_probs_of_each(models: ClientModels) -> None:
    models.create("own", LoraRequest(rank=8, seed=2))
    (one,), _ = models.train("own", call(range(1), forward_only=True))
    (three,), loss = models.train("own", call(range(1), columns=3, forward_only=True))
    assert three.shape == (9, 3)
    np.testing.assert_array_equal(three[:, 0], one)
    assert loss == pytest.approx(-three.sum(), rel=1e-5)


def test_a_saved_state_goes_on_as_the_model_itself(models: ClientModels, tmp_path: Path) -> None:
    trained(models, ["small"] * 2)
    models.save_state("small", tmp_path / "state", seq=7)
    assert models.load_state("copy", tmp_path / "state", with_optimizer=True) == 7
    assert models.load_state("fresh", tmp_path / "state", with_optimizer=False) == 7
    ends = []
    for name in ("small", "copy", "fresh"):
        models.train(name, call(range(9)))
        models.step(name, ADAM)
        ends.append(models.train(name, call(range(9), forward_only=True))[1])
    assert ends[0] == ends[1] != ends[2]
    assert models.rank("copy") == 4
