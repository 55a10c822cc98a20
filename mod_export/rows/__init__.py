"""What stages find out: one frozen row for each result, stored in report.json and in the manifest as it is."""
