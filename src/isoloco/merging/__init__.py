"""One-shot merging of checkpoints by the rules of the outer step: over mappings, and over files of any size."""
