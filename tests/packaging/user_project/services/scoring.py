"""How the user compares answers: a module that the project has under a name of ours."""


def close(answer: str, word: str) -> bool:
    """Whether they are as long as each other, up to one letter."""
    return abs(len(answer) - len(word)) <= 1
