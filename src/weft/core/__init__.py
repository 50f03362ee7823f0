"""What all capabilities share. It knows none of them."""
