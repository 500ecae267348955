"""The attention of the heads of a real encoder."""
