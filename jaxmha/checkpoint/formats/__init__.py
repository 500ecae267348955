"""Readers and writers of single formats; `table` lists them."""
