"""isoFLOP studies: which model is best when all are given the same training FLOPs."""
