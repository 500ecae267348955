"""What happens to every tensor in multi-head attention, and what its options cost."""
