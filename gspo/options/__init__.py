"""Options of an objective besides the clip. Each is off by default, and stands beside its formula.

Import from the module that defines a name; this door stays free of torch.

    aggregation   ``Reduction``, ``episode_tokens``
    contradictions what an objective cannot mean
    dual_clip     ``beyond_dual_clip``
    ess_rate      ``ess_rate_scale``
    overlong      ``overlong_penalties``, ``overlong``
    penalties     ``kl_estimates``, ``token_penalties``, ``sequence_kl``
    surrogates    what each token adds to J: the clip and its rivals
"""
