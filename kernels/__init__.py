"""The mathematics of linattn, without nn.Module: primitives, forms and associative operators."""
