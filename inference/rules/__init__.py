"""Acceptance rules, their random numbers, and sampling filters."""
