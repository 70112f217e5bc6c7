"""Products of 1 to 16 rows of x, which take as long as reading the weights takes."""
