"""What all networks here are built from: a decoder's parts, its caches, and attention layers."""
