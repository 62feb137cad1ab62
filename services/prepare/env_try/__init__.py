"""``gspo env try``: episodes played without a run, shown in the terminal as they would be trained on."""
