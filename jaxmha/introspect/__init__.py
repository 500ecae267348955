"""What attention computes, node by node, and what its heads attend to, in tables and drawings."""
