"""`python -m jaxmha.converters`: the command line."""

from jaxmha.cli.__main__ import main

if __name__ == "__main__":
    main()
