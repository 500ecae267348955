"""Online softmax over tiles of scores, in plain XLA."""
