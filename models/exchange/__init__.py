"""Exchange heads: export to serving engines, import from other projects, cards, the Hub."""
