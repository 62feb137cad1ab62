"""Mixtures of experts: recorded choices, routing replay, and the layouts of expert weights.

Import from the module that defines a name; this door stays free of torch.

    mixture          ``Mixture``, ``mixture_of``: what a configuration says of experts
    experts          ``ExpertPicks``, ``ExpertRecorder``, ``ExpertTally``, ``changed_share``
    routing_replay   ``RoutingReplay``
    load_balance     ``load_balancing_loss``, ``RouterLogits``
    bias_balance     ``BiasBalance``
    expert_layout    ``Piece``, ``pieces``, ``slab_of``
"""
