"""Models to export: what a model has to provide (`protocol`), and how a checkpoint is read (`checkpoint`)."""
