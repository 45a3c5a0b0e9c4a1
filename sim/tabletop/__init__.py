"""The embedded robosuite suite; see `sim.tabletop.simulator`."""
