"""Variables of the environment, and the cost of a call."""
