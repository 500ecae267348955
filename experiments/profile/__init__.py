"""Where the time of a layer goes on a CPU."""
