"""Arms behind one Protocol (`real.robots.protocol.Robot`): a fake one, a simulated one,
lerobot's."""
