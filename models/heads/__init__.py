"""Drafts: heads on a target's states, and language models."""
