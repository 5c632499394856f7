"""``python -m hal``: the ``hal`` command."""

from hal.cli import main

main()
