"""`python -m mod_export`: the command line where no scripts are on the path."""

from mod_export.cli import main

main()
