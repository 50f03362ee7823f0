"""A model cut across devices."""
