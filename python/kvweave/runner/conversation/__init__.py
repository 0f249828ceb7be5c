"""Prompts that go on: what one turn computed serves the next."""
