"""``gspo export``: writes a checkpoint as an ordinary Hugging Face model, with a card on how it was trained."""
