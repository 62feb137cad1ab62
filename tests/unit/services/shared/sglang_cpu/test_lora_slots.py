"""Adapters of SGLang on a CPU, as far as they can be tested without a server."""

from types import SimpleNamespace

import torch

from gspo_services.shared.sglang_cpu.lora_slots import announce_slots, pin_nothing, report_slots, slots
from gspo_services.shared.weights import REPORTS_SLOTS, slot_name


def test_what_asks_for_pinned_memory_gets_ordinary_memory() -> None:
    module = SimpleNamespace(torch=torch)
    before = torch.Tensor.pin_memory
    try:
        pin_nothing(module)
        assert module.torch.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
        assert module.torch.zeros((2,), pin_memory=True).pin_memory().tolist() == [0, 0]
        assert module.torch.cumsum is torch.cumsum
    finally:
        torch.Tensor.pin_memory = before  # type: ignore[method-assign]


def a_manager() -> SimpleNamespace:
    """Two layers of two modules; slot 1 has an adapter of rank 2 where 3 fit, slot 0 none."""
    a_buffer = {"qkv_proj": [torch.rand(2, 9, 4) for _ in range(2)], "o_proj": [torch.rand(2, 3, 4) for _ in range(2)]}
    b_buffer = {"qkv_proj": [torch.rand(2, 8, 3) for _ in range(2)], "o_proj": [torch.rand(2, 4, 3) for _ in range(2)]}
    pool = SimpleNamespace(A_buffer=a_buffer, B_buffer=b_buffer, uid_to_buffer_id={None: 0, "u": 1}, max_lora_rank=3)
    adapters = {"u": SimpleNamespace(config=SimpleNamespace(r=2))}
    return SimpleNamespace(memory_pool=pool, lora_refs={"u": SimpleNamespace(lora_name="n")}, loras=adapters)


def test_a_slot_is_reported_without_what_the_rank_leaves_free() -> None:
    manager = a_manager()
    found = dict(slots(manager))
    assert len(found) == 8
    assert torch.equal(found[slot_name("n", 1, "qkv_proj", "A")], manager.memory_pool.A_buffer["qkv_proj"][1][1, :6])
    assert torch.equal(found[slot_name("n", 0, "o_proj", "B")], manager.memory_pool.B_buffer["o_proj"][0][1, :, :2])


def test_the_checksums_of_a_model_with_adapters_are_followed_by_those_of_its_slots() -> None:
    class LoRAManager(SimpleNamespace):
        def __init__(self, base_model: torch.nn.Module, rank: int) -> None:
            super().__init__(**vars(a_manager()), rank=rank)

    class WeightChecker:
        def __init__(self, model: torch.nn.Module) -> None:
            self._get_model = lambda: model

        def _model_state(self):  # type: ignore[no-untyped-def]
            yield from self._get_model().named_parameters()

    managers, checkers = SimpleNamespace(LoRAManager=LoRAManager), SimpleNamespace(WeightChecker=WeightChecker)
    report_slots(managers, checkers)
    plain, adapted = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert managers.LoRAManager(adapted, rank=2).rank == 2
    assert list(dict(checkers.WeightChecker(plain)._model_state())) == ["weight", "bias"]
    assert len(dict(checkers.WeightChecker(adapted)._model_state())) == 2 + 8
    assert [name for name, _ in adapted.named_modules()] == [""], "the manager is no part of the model"


def test_the_server_says_so_once() -> None:
    arguments = SimpleNamespace(custom_weight_loader=["another"])
    announce_slots(arguments)
    announce_slots(arguments)
    assert arguments.custom_weight_loader == ["another", REPORTS_SLOTS]
