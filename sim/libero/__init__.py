"""LIBERO (Liu et al. 2023) as a `vla_rl.interfaces.Simulator`; see `sim.libero.simulator`."""
