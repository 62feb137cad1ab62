"""A batch of any size on its way from the ledger to the learner's ranks."""
