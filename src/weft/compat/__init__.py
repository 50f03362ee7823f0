"""Doors for those who come from other libraries: their names, on top of what weft has."""
