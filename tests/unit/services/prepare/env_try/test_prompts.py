"""Which messages an answer is shown for, where only the engine's tokens are known."""

from gspo_services.prepare.env_try.prompts import Prompt, Prompts


def test_an_answer_that_a_demand_has_opened_is_shown_for_its_messages() -> None:
    prompts = Prompts()
    prompts.add(Prompt(token_ids=(1, 2), messages=[{"role": "user", "content": "a"}], is_new=True))
    prompts.opens_with([7, 8])
    opened, plain = prompts.found([1, 2, 7, 8]), prompts.found([1, 2])
    assert opened is not None
    assert plain is not None
    assert (opened.opening, plain.opening, opened.messages) == ((7, 8), (), plain.messages)
    assert prompts.found([1, 2, 7]) is None
    prompts.clear()
    assert prompts.found([1, 2, 7, 8]) is None
