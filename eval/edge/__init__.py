"""Decode benchmarks with the draft and the target on two sides of a network link."""
