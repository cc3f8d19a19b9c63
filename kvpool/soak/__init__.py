"""A soak: traffic over a real pool for as long as you like, every row of K and V checked."""
