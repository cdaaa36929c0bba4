"""Packaged recipes: one commented YAML file per experiment."""
