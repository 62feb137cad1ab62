"""What each rank of a learner takes while it loads its model."""
