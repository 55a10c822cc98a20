"""`python -m mod_export.cli`, for where no scripts are on the path."""

from mod_export.cli import main

main()
