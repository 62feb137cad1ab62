"""Hugging Face models on packed sequences: packing, segment attention, log-probabilities, and weights as engines load them.

Import from the module that defines a name; this door stays free of torch.

    packing     ``TrainSequence``, ``TrainGroup``, ``PackedBatch``, ``pack``
    micro_batches   ``plan_micro_batches``
    policy      ``load_policy``, ``prepare_policy``
    logprobs    ``TokenLogProbs``, ``chunked_logprobs``
    attention   ``segment_attention``, ``register_segment_attention``
    sequence_parallel   ``RowShare``
    serving     ``serving_weights``, ``served_parameters``, ``is_partitioned``
"""
