"""One nn.Module per mixer: projections plus one call of a form."""
