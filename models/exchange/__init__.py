"""Export, import and upload heads, and write their model cards."""
