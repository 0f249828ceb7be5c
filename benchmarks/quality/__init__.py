"""Answers against the whole model's, on lists that were frozen before."""
