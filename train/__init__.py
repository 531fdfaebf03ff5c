"""Train draft heads."""
