"""``gspo export``: a checkpoint as an ordinary Hugging Face model, with a card that says how it was trained."""
