"""The plugin beside stock vLLM."""
