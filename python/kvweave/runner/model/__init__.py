"""A model as the runner sees it: its shape, its layers, its rotation, what its forward takes."""
