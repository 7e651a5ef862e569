"""How rows move and multiply: tensors in, tensors out. `reference` is the specification of the rest."""
