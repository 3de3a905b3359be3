"""The operations as torch knows them: operators, autograd, and the rules of DTensor."""
