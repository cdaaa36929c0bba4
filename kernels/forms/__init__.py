"""Each mixer as a function of its tensors: a composition of primitives with its serial oracle beside it."""
