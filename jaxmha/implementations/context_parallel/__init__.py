"""Queries, keys and values split by position over many devices."""
