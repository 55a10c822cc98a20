"""`python -m mod_export`: the command line, for use if the script `mod-export` is not on the path."""

from mod_export.cli import main

main()
