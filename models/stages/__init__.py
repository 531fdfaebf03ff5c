"""Target models, cut into stages, and the trial that accepts a family."""
