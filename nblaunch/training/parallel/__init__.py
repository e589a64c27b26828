"""Models that ranks divide among them, and the states of such models."""
