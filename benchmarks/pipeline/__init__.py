"""The whole pipeline compared with its halves: SGLang alone and the learner alone."""
