"""OpenAI-compatible HTTP server for a target and its draft."""
