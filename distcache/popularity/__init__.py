"""How often rows are looked up: counts, what follows from them, and what is kept of them."""
