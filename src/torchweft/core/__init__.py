"""Code that several capabilities share. It depends on none of them."""
