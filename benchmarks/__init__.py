"""How fast the recipe and its engines are, against what they could be: `make bench`."""
