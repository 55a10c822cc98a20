"""The stages of a build. Every unit of work is a step of the workspace, whose outputs are reused if its inputs are
unchanged.
"""
