"""Head classes as vLLM can carry them: all heads of a class as one cache layer.

`class_map` reads a head map, `split` says in which order heads are loaded, and `worker` makes the
layers. `spec` and `sink_manager` have vLLM's scheduler keep the sink of local heads; `scheduler`
reports what is held, by way of `connector`.
"""
