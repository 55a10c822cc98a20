"""The build folder on disk: content-addressed steps, hashes, atomic writes, a lock."""
