"""Episodes: the engine that runs them, and how they become trajectories."""
