"""Operations as data, each compiled once into the functions that its calls go through."""
