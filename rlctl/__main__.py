"""``python -m rlctl``: the command line."""

from rlctl.cli.main import main

main()
