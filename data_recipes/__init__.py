"""Turn conversations and documents into training data for heads (token ids and loss masks)."""
