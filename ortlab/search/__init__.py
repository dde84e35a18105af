"""Which settings train a model best here: the race of some, and the search among all."""
