"""The error of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that is damaged; or a folder that is in use."""
