"""The broker process: which task comes next, what arrives is durable, which groups make a batch."""
