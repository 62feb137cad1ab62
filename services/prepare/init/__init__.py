"""``gspo init``: a new project, whose configuration fits its model, its tasks and its hardware."""
