"""A load: what the ranks want of a file, who reads it, and how it reaches them."""
