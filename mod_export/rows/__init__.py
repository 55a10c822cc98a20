"""Results of the stages: one frozen row for each result, stored unchanged in report.json and in the manifest."""
