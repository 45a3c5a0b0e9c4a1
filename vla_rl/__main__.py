"""``python -m vla_rl``: the same command line, where the folder of scripts is not on the path."""

from vla_rl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
