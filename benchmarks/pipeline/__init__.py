"""The whole pipeline against its halves: what a run trains beside what SGLang alone makes and the learner alone trains."""
