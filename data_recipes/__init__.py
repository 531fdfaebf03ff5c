"""Training data for heads: conversations and documents as token ids with loss masks."""
