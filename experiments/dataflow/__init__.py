"""Every tensor in multi-head attention, and the cost of its options."""
