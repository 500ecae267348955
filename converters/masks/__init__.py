"""Mask arguments of every framework as tables, with their import and export."""
