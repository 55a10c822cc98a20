"""Numbers about built engines: latency, speed-up, cost, and the verdict over all gates."""
