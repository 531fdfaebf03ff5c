"""Ask a running OpenAI-compatible server the benchmarks, and count its accepted draft tokens."""
