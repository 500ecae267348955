"""Tables and drawings of the nodes of attention and of the weights of its heads."""
