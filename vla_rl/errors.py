"""Errors a user can act on. The CLI prints them as one message, without a traceback."""


class UserError(Exception):
    """Bad input or a missing piece of the machine. The message names the value, the place and the remedy."""


class ConfigError(UserError):
    """An unknown key, a wrong type or a value outside its range in the configuration."""


class EmbodimentMismatch(UserError):
    """Env, policy, checkpoint or dataset disagree about the robot, its cameras or its actions."""


class MissingPackage(UserError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'vla-rl[{extra}]'"
        )
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """So that a worker process can send it."""
        return type(self), (self.package, self.extra, self.purpose)


class MissingDependency(UserError):
    """Something outside Python (a GL library, an asset set, a device) is missing."""


class NoGradient(UserError):
    """A loss reached none of the parameters that it should train."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or made for something else."""


class DiskFull(UserError):
    """There is no room left where a checkpoint is to be written."""


class TrainingDiverged(UserError):
    """Too many updates in a row had a loss that was not finite."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its class where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
