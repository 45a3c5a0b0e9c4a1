"""Sessions with an arm: settings, the policy's process, the launcher, the checks of a machine.
`real` is reached by name."""
