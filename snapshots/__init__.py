"""Memory snapshots of a live engine: capture, diff, verdict."""
