"""Recordings of other formats, each read as `Take`s, for `vla_rl.data.convert`."""
