"""What goes wrong with kernels on a GPU: told apart by those who answer for it, the command line too, without torch."""


class DoesNotFit(ValueError):
    """A kernel needs more of something than the GPU has, mostly shared memory; a plain form needs none of it."""


class FallbackWarning(RuntimeWarning):
    """`auto` computes by another implementation than it chose first."""
