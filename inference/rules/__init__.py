"""Acceptance rules, their random numbers, and filters of distributions."""
