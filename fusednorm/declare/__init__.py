"""What an operation is: declared as data, and compiled once into the functions that calls go through."""
