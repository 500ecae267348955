"""The cost of attention on several devices."""
