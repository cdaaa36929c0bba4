"""The associative operators of the mixers and one generic Blelloch scan over them."""
