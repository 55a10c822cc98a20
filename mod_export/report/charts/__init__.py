"""Geometry of the figures of report.html, one file for each section. Places are percentages of a figure's width.

Percentages let a figure fit a phone without shrinking its labels. What is drawn may be thinned out, never a number that
is written.
"""
