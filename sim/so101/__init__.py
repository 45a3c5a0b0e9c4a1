"""SO-101: its MuJoCo model, and the servos that it has on a serial bus."""
