"""The cost of attention on more devices than one."""
