"""Steps of the learner on paper: ranks and GPUs that are not there, and how much memory they would take."""
