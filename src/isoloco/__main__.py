"""`python -m isoloco`: the same as the `isoloco` command (torchrun needs a module)."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
