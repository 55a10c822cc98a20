"""A grid of builds (capacity x batch x sequence x target), each measured in its own process, and the findings.

run (the grid) > cell (one process each, on this machine or on a Ray cluster) > findings > show (text, page)
"""
