"""Heads that keep every token and read few pages of it in a decode step (FlexiCache, section 3).

`map` reads which heads do, `model` puts layers that rank pages in place of a model's own. A layer
has bounds of its keys beside its keys and values, a cache layer of vLLM (`bounds_cache`): so they
are of the blocks, and whoever finds a block in the prefix cache finds its bounds. `builder` makes
the tables of a step, `choice` has the device choose pages by them, and `attention` reads those.
"""
