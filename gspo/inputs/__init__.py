"""What the loss is given: checked tensors, 0 off the mask, with their ratio units and sums over segments.

Import from the module that defines a name; this door stays free of torch.

    loss_inputs   ``LossInputs``, ``loss_inputs``
    units         ``Units``, ``ratio_units``, ``segment_sum``, ``segment_mean``
    validation    ``trusted_values``, and the checks that name an argument, its index and its value
"""
