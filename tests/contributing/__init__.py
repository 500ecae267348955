"""One of everything that a newcomer may add, in the files that CONTRIBUTING.md names."""
