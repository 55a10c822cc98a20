"""Serves build folders: an OpenAI-compatible server, and the same application on Ray Serve.

This module holds only the defaults of options, which the command line, Ray and Triton share.
"""

MAX_QUEUE = 64
"""How many texts may wait for a row."""
MAX_WAIT_S = 30.0
"""How many seconds a request may wait for its first row."""
DRAIN_S = 30.0
"""How many seconds texts have to finish after a server was told to stop."""
KEEP_ALIVE_S = 75.0
"""How many seconds a connection may stay open between two requests, as in nginx. Clients and proxies keep idle
connections for less, 5 to 60 seconds, so it is they who close them, and no request meets a connection that is closing.
"""
PREFIX_CACHE_MIB = 256
"""Memory, in MiB, for what texts have read, so that later texts with the same beginning need not read it again."""
