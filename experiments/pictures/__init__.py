"""What the heads of a real encoder attend to."""
