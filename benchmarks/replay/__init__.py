"""Real traces through the cache: what each order of eviction finds, and what none could exceed."""
