"""`python -m pdd` is `pdd`."""

from pdd.cli import main

main()
