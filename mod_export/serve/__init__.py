"""Build folders as services: an OpenAI-compatible server, and the same application on Ray Serve."""
