"""Environments: the vector contract, one module per backend, and normalisation."""
