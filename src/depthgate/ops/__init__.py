"""Operations that move and multiply rows: tensors in, tensors out. `reference` is the specification of the rest."""
