"""Models to export: what a model has to provide (`model`), and how a checkpoint is read (`checkpoint`)."""
