"""Training data of drafts: conversations and documents as token ids with loss masks."""
