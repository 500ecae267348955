"""Entry of the command line; says what to install where its libraries are missing."""

import sys


def main() -> None:
    """Runs `jaxmha`."""
    try:
        from jaxmha.converters.cli import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        print(f"the command line needs {missing.name}: pip install 'jaxmha[cli]'", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
