"""Masks of every framework, in and out: one table of arguments each."""
