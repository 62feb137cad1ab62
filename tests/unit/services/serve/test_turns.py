"""The order of calls: by number within a model, in turn between models."""

from gspo_services.serve.turns import MOST, Turns


def taken(turns: Turns) -> list[tuple[str, int]]:
    """All calls that can be executed, turn by turn; each third call ends its turn, as optimizer steps do."""
    found = []
    while (model := turns.peek()) is not None:
        for _ in range(MOST):
            number = turns.take(model)
            if number is None:
                break
            found.append((model, number))
            if number and number % 3 == 0:
                break
        turns.end_turn()
    return found


def test_chunks_that_arrive_backwards_are_executed_by_their_numbers() -> None:
    turns = Turns()
    for number in (3, 0, 4, 2):
        turns.add("a", number)
    assert taken(turns) == [("a", 0)]
    turns.add("a", 1)
    assert taken(turns) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


def test_models_have_turns_so_that_none_waits_for_all_calls_of_another() -> None:
    turns = Turns()
    for number in range(7):
        turns.add("a", number)
    turns.add("b", 0)
    turns.add("b", 1)
    assert [model for model, _ in taken(turns)] == ["a"] * 4 + ["b"] * 2 + ["a"] * 3


def test_a_turn_without_a_step_ends_as_well() -> None:
    turns = Turns()
    turns.begin("a", 1)
    for number in range(1, 2 * MOST):
        turns.add("a", number)
    turns.add("b", 0)
    model = turns.peek()
    assert model == "a"
    assert [turns.take("a") for _ in range(MOST)] == list(range(1, MOST + 1))
    turns.end_turn()
    assert turns.peek() == "b"


def test_a_model_that_goes_on_after_a_snapshot_takes_no_older_call() -> None:
    turns = Turns()
    turns.begin("a", 5)
    for number in range(8):
        turns.add("a", number)
    assert turns.waiting("a") == 3
    assert taken(turns) == [("a", 5), ("a", 6), ("a", 7)]
    assert turns.waiting("a") == 0
