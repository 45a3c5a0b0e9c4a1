"""What measures the product: nothing of the product imports it, and it may import everything."""
