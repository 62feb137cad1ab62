"""What of a run grows with its batches, and how fast."""
