"""The trunk that the small VLA policies share; see `policies.trunk.trunk`."""
