"""What drafts are trained on: conversations and texts as token ids with assistant loss masks."""
