"""Build folders as services: an OpenAI-compatible server, and the same application on Ray Serve.

Here stands only what holds unless somebody says otherwise, on a command line, on Ray or in Triton.
"""

MAX_QUEUE = 64
"""Texts that may wait for a row."""
MAX_WAIT_S = 30.0
"""Seconds that a request may wait for its first row."""
DRAIN_S = 30.0
"""Seconds that texts have to end after a server was told to."""
