"""What a request keeps in the cache, and the tables that ops read it by."""
