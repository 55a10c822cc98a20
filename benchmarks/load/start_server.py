"""Starts a server like `mod-export serve`, with a limit that the command has no option for.

    python benchmarks/load/start_server.py FOLDER PORT STALLED_MS

STALLED_MS: milliseconds after which the server cuts off a client that reads nothing.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from mod_export.serve import server
from mod_export.serve.service import ServiceOptions

if __name__ == "__main__":
    server.STALLED_MS = int(sys.argv[3])
    sys.exit(
        server.serve_folder(
            Path(sys.argv[1]),
            ServiceOptions(),
            server.ServerOptions(port=int(sys.argv[2])),
            say=partial(print, file=sys.stderr, flush=True),
        )
    )
