"""The learner process: batches in, policy versions out."""
