"""What is wrong with a model's tokenizer or chat template."""


class TokenizerError(ValueError):
    """The model's tokenizer or chat template cannot be used; the text names the file and the remedy."""
