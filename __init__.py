"""pipedraft: train draft heads that keep a pipelined language model busy, and decode with them."""

__version__ = "0.1.0"
