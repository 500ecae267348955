"""Runs the command line as `python -m jaxmha.converters`."""

from jaxmha.cli.__main__ import main

if __name__ == "__main__":
    main()
