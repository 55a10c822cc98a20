"""The charts of report.html, one file for each section of the page."""
