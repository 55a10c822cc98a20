"""Starts a server as `mod-export serve` does, with what no option of it sets.

    python benchmarks/load/start_server.py FOLDER PORT STALLED_MS

STALLED_MS: milliseconds after which a client that takes nothing is cut off.
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
            Path(sys.argv[1]), ServiceOptions(), port=int(sys.argv[2]), say=partial(print, file=sys.stderr, flush=True)
        )
    )
