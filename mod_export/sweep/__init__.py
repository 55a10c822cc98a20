"""A grid of builds: capacity x batch x sequence x target, each measured in a process of its own, and what follows.

grid > cell (a process each, here or on a Ray cluster) > findings > text, HTML
"""
