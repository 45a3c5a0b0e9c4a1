"""Several processes on one run. `ranks`: those that learn together."""
