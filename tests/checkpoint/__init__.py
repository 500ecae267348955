"""Tests of checkpoint files."""
